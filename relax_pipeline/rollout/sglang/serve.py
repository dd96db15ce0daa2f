"""SGLang 0.5.16's server for adapters on delta nets: its engine hosts them, its command line refuses their names."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    from sglang.srt.utils import common

    from relax_pipeline.rollout.sglang.flavour import DELTA_NET_LEAVES

    common.SUPPORTED_LORA_TARGET_MODULES.extend(sorted(DELTA_NET_LEAVES))
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
