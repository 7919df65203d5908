"""Runs one forward pass: a decision to tensors, and its logits."""
