"""What a model's layers keep of each token for the backward pass, read from the code of the trainers' layers.

Counted in numbers of the model's precision, a float32 among bfloat16 as two. What a head or an expert keeps once, such
as the sum of its softmax, is left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from relax_pipeline.trainer.megatron_limits import EXPERT_COUNTS

_DELTA_CHUNK = 64
"""Tokens that the kernels of gated delta nets, and what stands for them, work on together."""


class Kept(NamedTuple):
    """Numbers a token."""

    alike: int
    """The same on all tensor-parallel ranks, unless they share the sequence."""
    split: int
    """Divided among them."""

    def plus(self, other: Kept) -> Kept:
        """Both."""
        return Kept(self.alike + other.alike, self.split + other.split)


def kept_by_megatron(shape: Any, *, rank: int, wide: int, ranks: int, delta_kernels: bool) -> list[Kept]:
    """Return what each layer of the Megatron trainer's model keeps, on torch's own kernels.

    Args:
        shape: transformers' configuration of the language model.
        rank: Of the adapters; 0 without.
        wide: Numbers of the model's precision that a float32 is as large as.
        ranks: That share each sequence.
        delta_kernels: Whether gated delta nets run on flash-linear-attention, else on torch alone.
    """
    hidden, zero_centred = shape.hidden_size, is_hybrid(shape)  # whose norms read float32
    norms = Kept(2 * hidden + 2 * hidden * (wide if zero_centred else 1), 0)
    delta_net = _delta_net(shape, wide, kernels=delta_kernels).plus(Kept(2 * rank, 0))
    attention = _attention(shape, wide, ranks).plus(Kept(2 * rank, 0))
    feed_forward = _experts(shape, rank) if has_experts(shape) else _mlp(shape.intermediate_size, rank)
    return [(delta_net if linear else attention).plus(norms).plus(feed_forward) for linear in linear_layers(shape)]


def kept_by_transformers(shape: Any, *, rank: int, wide: int, length: int, delta_kernels: bool) -> list[Kept]:
    """Return what each layer of the fsdp trainer's model keeps, its sequences padded.

    Norms compute in float32. So do adapters, each of which keeps its own copy of what it reads; where the model is
    float32 there is none to keep. Keys and values are repeated for all heads, since padding needs a mask.

    Args:
        shape: transformers' configuration of the language model, which has no experts.
        rank: Of the adapters; 0 without.
        wide: Numbers of the model's precision that a float32 is as large as.
        length: Of the sequences: a row of the mask.
        delta_kernels: Whether gated delta nets run on flash-linear-attention, else on torch alone.
    """
    hidden, inner, own = shape.hidden_size, shape.intermediate_size, wide > 1
    heads, keys = _widths(shape)
    norms = 2 * wide * hidden
    mlp = 3 * inner + wide * inner + wide * hidden * (2 if own else 1)
    gate = (2 + wide) * heads if is_hybrid(shape) else wide * heads * own  # sigmoid, what it scales, the result
    attention = wide * hidden * (3 if own else 1) + wide * (heads + keys) + 4 * heads + gate + length
    delta_net = wide * hidden * (4 if own else 1) + _delta_net(shape, wide, kernels=delta_kernels).split
    layers = (delta_net if linear else attention for linear in linear_layers(shape))
    return [Kept(mixer + norms + mlp + 7 * wide * rank, 0) for mixer in layers]


def is_known(shape: Any) -> bool:
    """Whether the layers are those counted here: grouped queries or gated delta nets, then SwiGLU or experts."""
    latent = getattr(shape, "kv_lora_rank", None)
    grouped = hasattr(shape, "num_key_value_heads") and not latent
    deltas = hasattr(shape, "linear_num_value_heads") or not is_hybrid(shape)
    return grouped and deltas and (hasattr(shape, "intermediate_size") or has_experts(shape))


def linear_layers(shape: Any) -> list[bool]:
    """Return of each layer whether it is a gated delta net instead of attention."""
    kinds = getattr(shape, "layer_types", None) or ["full_attention"] * shape.num_hidden_layers
    return [kind == "linear_attention" for kind in kinds]


def is_hybrid(shape: Any) -> bool:
    """Whether some layers are gated delta nets, as in Qwen3-Next and Qwen3.5: attention has an output gate there."""
    return any(linear_layers(shape))


def has_experts(shape: Any) -> bool:
    """Whether its layers are mixtures of experts."""
    return any(getattr(shape, name, None) for name in EXPERT_COUNTS)


def head_size(shape: Any) -> int:
    """Return the width of one head of attention."""
    return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)


def _widths(shape: Any) -> tuple[int, int]:
    """Return the width of all queries, and of all keys."""
    return shape.num_attention_heads * head_size(shape), shape.num_key_value_heads * head_size(shape)


def _attention(shape: Any, wide: int, ranks: int) -> Kept:
    """Return for flash attention, which keeps no scores: queries before and after norm and rotation, output, keys,
    values, keys rotated; with an output gate also the gate and its result. On a CPU the output is there twice, and
    the sigmoid of the gate."""
    heads, keys = _widths(shape)
    queries = 5 + wide if is_hybrid(shape) else 4
    reached = (2 * ranks + 1) * keys if ranks > 1 else 0  # each chunk keeps the keys and values up to its own end
    return Kept(0, queries * heads + 3 * keys + reached)


def _mlp(inner: int, rank: int) -> Kept:
    """Return SwiGLU's input and output."""
    return Kept(2 * rank, 3 * inner)


def _experts(shape: Any, rank: int) -> Kept:
    """Return for grouped experts: of each of a token's experts its input, SwiGLU's input, its output before and after
    the router's weight; of a shared one also the output that its gate scales. The ranks that share the experts are
    taken to get as many tokens each."""
    inner = getattr(shape, "moe_intermediate_size", None) or shape.intermediate_size
    routed = Kept(shape.num_experts_per_tok * (shape.hidden_size + 4 * inner + 2 * rank), 0)
    shared = getattr(shape, "shared_expert_intermediate_size", None)
    return routed.plus(_mlp(shared, rank)).plus(Kept(shape.hidden_size, 0)) if shared else routed


def _delta_net(shape: Any, wide: int, *, kernels: bool) -> Kept:
    if not is_hybrid(shape):
        return Kept(0, 0)
    heads, chunk = shape.linear_num_value_heads, _DELTA_CHUNK
    keys, values = shape.linear_num_key_heads * shape.linear_key_head_dim, heads * shape.linear_value_head_dim
    repeated = heads * shape.linear_key_head_dim
    if kernels:
        # The convolution's input, keys and queries normed and repeated, values, a row of the chunk's matrix, output,
        # gate, gated output.
        return Kept(0, 4 * keys + 5 * values + 2 * repeated + chunk * heads)
    # Torch keeps in float32 each of the chunk's matrices, every step of inverting one, and the state of each chunk.
    inversion = sum(step * (step + 1) for step in range(1, chunk)) // chunk
    rule = 5 * repeated + 3 * values + heads * (6 * chunk + inversion) + repeated * shape.linear_value_head_dim // chunk
    return Kept(0, 6 * keys + 3 * values + wide * (rule + 4 * values))
