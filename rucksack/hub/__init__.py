"""Weights in other formats: found by name, published ones loaded, ours exported to transformers."""
