"""LoRA tensors: their names, where they go in a model, how they fold into a weight, and how they lie on disk."""
