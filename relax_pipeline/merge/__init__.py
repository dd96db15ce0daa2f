"""Merge an adapter into its base checkpoint, tensor by tensor, into a standalone Hugging Face folder."""
