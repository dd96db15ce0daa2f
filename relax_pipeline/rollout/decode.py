"""Batched decoding with a transformers model and its key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from relax_pipeline.rollout.sampling import sample_tokens, uniform_stream
from relax_pipeline.types import FinishReason, GenerateRequest

# B rows, S tokens fed in one forward pass, T tokens decoded


@dataclass(frozen=True, slots=True)
class Decoded:
    """One decoded sequence."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason


@torch.inference_mode()
def decode(model: PreTrainedModel, requests: Sequence[GenerateRequest]) -> list[Decoded]:
    """Decode all requests as one batch; the result depends on these requests and the weights only."""
    params = [request.sampling for request in requests]
    limits = np.array([p.max_new_tokens for p in params])
    uniforms_BT = torch.stack([uniform_stream(request.seed, int(limits.max())) for request in requests])
    ids_BS, mask_BS = left_pad([request.token_ids for request in requests], device=model.device)
    cache = DynamicCache(config=model.config)  # layers with a state of another kind keep it too
    tokens_TB: list[torch.Tensor] = []
    logprobs_TB: list[torch.Tensor] = []
    lengths, stopped = np.zeros_like(limits), np.zeros(len(requests), dtype=bool)
    while not (stopped | (lengths >= limits)).all():
        positions_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)[:, -ids_BS.shape[1] :]
        logits_BV = model(
            input_ids=ids_BS,
            attention_mask=mask_BS,
            position_ids=positions_BS,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens_B, logprobs_B = sample_tokens(logits_BV, uniforms_BT[:, len(tokens_TB)], params)
        tokens_TB.append(tokens_B.cpu())
        logprobs_TB.append(logprobs_B.cpu())
        running = ~stopped & (lengths < limits)
        lengths += running
        stops = [token in p.stop_token_ids for token, p in zip(tokens_TB[-1].tolist(), params, strict=True)]
        stopped |= running & np.array(stops)
        ids_BS = tokens_B[:, None]
        mask_BS = torch.cat([mask_BS, torch.ones_like(ids_BS)], dim=1)
    tokens_BT = torch.stack(tokens_TB, dim=1).numpy()
    logprobs_BT = torch.stack(logprobs_TB, dim=1).numpy()
    return [
        Decoded(tokens_BT[row, :length].copy(), logprobs_BT[row, :length].copy(), "stop" if stopped[row] else "length")
        for row, length in enumerate(lengths.tolist())
    ]


def left_pad(prompts: Sequence[Sequence[int]], *, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids_BS and mask_BS (1 on real tokens), padded on the left with token 0."""
    width = max(len(prompt) for prompt in prompts)
    ids_BS = torch.zeros(len(prompts), width, dtype=torch.long)
    mask_BS = torch.zeros_like(ids_BS)
    for row, prompt in enumerate(prompts):
        ids_BS[row, width - len(prompt) :] = torch.tensor(prompt)
        mask_BS[row, width - len(prompt) :] = 1
    return ids_BS.to(device), mask_BS.to(device)
