"""What a worker imports to cancel a run or call a hook must take seconds, and no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("flow", ["train", "merge_publish", "sweep", "evaluate", "recover", "pause"])
def test_a_flow_module_loads_without_torch_and_ray(flow: str) -> None:
    code = (
        f"import sys, flows.{flow}; print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
