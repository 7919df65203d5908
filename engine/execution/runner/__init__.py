"""Turns a decision into tensors, runs one forward pass and returns its logits."""
