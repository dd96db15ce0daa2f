"""What SGLang's Qwen3.5 calls on a CPU, in plain torch: one token after another, for small models.

T tokens of all sequences, C channels, H heads of queries and keys (N of values), K and V their sizes. States of
sequences lie in slots; a sequence's tokens lie between two of the starts.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn import functional

Tensor = torch.Tensor


def causal_conv1d_fn_cpu(
    x_CT: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve each sequence with what came before it, and keep its last columns."""
    out_CT = torch.empty_like(x_CT)
    for place, (start, end) in enumerate(_spans(query_start_loc)):
        state = conv_states[cache_indices[place]]
        before = state if has_initial_state[place] else torch.zeros_like(state)
        columns = torch.cat([before.to(x_CT.dtype), x_CT[:, start:end]], dim=1)
        out = functional.conv1d(columns[None], weight_CW[:, None], bias_C, groups=len(weight_CW))[0]
        out_CT[:, start:end] = functional.silu(out) if activation else out
        state.copy_(columns[:, -state.shape[1] :])
    return out_CT


def causal_conv1d_update_cpu(
    x_TC: Tensor,
    conv_states: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
    **_: Any,
) -> Tensor:
    """Convolve one more token of each sequence."""
    return causal_conv1d_fn_cpu(
        x_TC.T,
        weight_CW,
        bias_C,
        activation=activation,
        conv_states=conv_states,
        has_initial_state=torch.ones(len(x_TC), dtype=torch.bool),
        cache_indices=conv_state_indices,
        query_start_loc=torch.arange(len(x_TC) + 1),
    ).T.contiguous()


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Return [1, T, N, V]; the states [slot, N, V, K] go on in place."""
    _one, tokens, heads, _size = v.shape
    q_TNK, k_TNK = (_unit(part[0]).repeat_interleave(heads // part.shape[2], dim=1) for part in (q, k))
    out_TNV, decay_TN, beta_TN = v[0].float(), g.reshape(tokens, heads).exp(), beta.reshape(tokens, heads)
    for place, (start, end) in enumerate(_spans(cu_seqlens)):
        slot = initial_state[initial_state_indices[place]]
        state_NVK = slot.float()
        for t in range(start, end):
            state_NVK = state_NVK * decay_TN[t, :, None, None]
            known_NV = torch.einsum("nvk,nk->nv", state_NVK, k_TNK[t])
            change_NV = (v[0, t].float() - known_NV) * beta_TN[t, :, None]
            state_NVK = state_NVK + torch.einsum("nv,nk->nvk", change_NV, k_TNK[t])
            out_TNV[t] = torch.einsum("nvk,nk->nv", state_NVK, q_TNK[t]) * q.shape[-1] ** -0.5
        slot.copy_(state_NVK)
    return out_TNV[None].to(v.dtype), None, None


def _gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of what is kept, and the share that is written, [1, T, N] each."""
    return (-A_log.float().exp() * functional.softplus(a.float() + dt_bias))[None], b.float().sigmoid()[None]


def _decode(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    **rest: Any,
) -> Tensor:
    g, beta = _gates(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(g=g, beta=beta, initial_state=initial_state_source, **rest)[0]


def _split_and_norm(  # noqa: PLR0917 - as SGLang calls it
    q_gate: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head: int, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries and gates apart, head by head, and norm queries and keys."""
    q, gate = q_gate.reshape(len(k), num_heads, 2 * head).chunk(2, dim=-1)
    normed = (
        functional.rms_norm(part, (head,), 1 + weight, eps)
        for part, weight in ((q, q_weight), (k.reshape(len(k), -1, head), k_weight))
    )
    q, k = (part.flatten(1) for part in normed)
    return q, k, gate.flatten(1)


def _gate(attended: Tensor, gate: Tensor, *, inplace: bool) -> Tensor:
    assert inplace
    return attended.mul_(gate.reshape(attended.shape).sigmoid())


def _absent(*_arguments: Any, **_options: Any) -> None:
    raise NotImplementedError("this shape of Qwen3.5 has no CPU version here; serve it on a GPU")


def _unit(x: Tensor) -> Tensor:
    return functional.normalize(x.float(), dim=-1, eps=1e-6)


def _spans(starts: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(starts.tolist()))


def install() -> None:
    """Put these where SGLang looks for its compiled ones."""
    for name, kernel in {
        "fused_sigmoid_mul_cpu": _gate,
        "fused_qk_gemma_rmsnorm_cpu": _absent,
        "fused_qk_gemma_rmsnorm_with_gate_cpu": _split_and_norm,
        "fused_qkvzba_split_reshape_cat_contiguous_cpu": _absent,
        "fused_sigmoid_gating_delta_rule_update_cpu": _decode,
        "fused_gdn_gating_cpu": _gates,
    }.items():
        setattr(torch.ops.sgl_kernel, name, kernel)
