"""The last word on a merge: the merged model against base + adapter as peft runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel

from relax_pipeline.errors import MergeError
from relax_pipeline.merge.base import CONFIG_FILE

NUM_TOKENS = 32
ROUNDING_NATS = 0.05
"""What rounding the weights to bfloat16 may cost in logprobs, on average."""


def compare_logits(base: Path, adapter: Path, merged: Path) -> dict[str, float]:
    """Run both models in float32 on the same tokens; one of them at a time is in memory.

    Args:
        base: Unquantised checkpoint that transformers loads without custom code.
        adapter: PEFT folder.
        merged: What was merged from the two.

    Returns:
        Mean absolute difference in nats over all next-token logprobs: `merged_vs_adapter`, and `base_vs_adapter` for
        scale.

    Raises:
        MergeError: The merged model differs by more than rounding explains, or the model does not run here.
    """
    model = _load(base)
    token_ids = torch.arange(1, NUM_TOKENS + 1).mul(7919).remainder(model.get_input_embeddings().num_embeddings)[None]
    base_logprobs = _logprobs(model, token_ids)
    adapter_logprobs = _logprobs(PeftModel.from_pretrained(model, str(adapter)), token_ids)
    del model
    merged_logprobs = _logprobs(_load(merged), token_ids)
    difference = float((merged_logprobs - adapter_logprobs).abs().mean())
    effect = float((base_logprobs - adapter_logprobs).abs().mean())
    if not difference <= ROUNDING_NATS + effect / 10:
        raise MergeError(
            f"the merged model's logprobs are {difference:.4f} nats from base + adapter on average, rounding explains "
            f"{ROUNDING_NATS + effect / 10:.4f}; the adapter itself makes {effect:.4f}"
        )
    return {"merged_vs_adapter": difference, "base_vs_adapter": effect}


def _load(folder: Path) -> Any:
    config = json.loads((folder / CONFIG_FILE).read_text())
    name = (config.get("architectures") or [""])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None or config.get("quantization_config"):
        raise MergeError(
            f"{folder.name}: architecture {name!r} (quantised: {bool(config.get('quantization_config'))}) does not run "
            "in float32 here, so logits cannot be compared; merge without that check"
        )
    return model_class.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@torch.inference_mode()
def _logprobs(model: Any, token_ids: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=token_ids, use_cache=False).logits.double(), dim=-1)
