"""Safetensors files below the level of tensors: identity of a model folder, headers, streamed writing."""
