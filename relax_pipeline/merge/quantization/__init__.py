"""Quantised weights: recognised by their config, read as float32 values, written back as codes and scales."""
