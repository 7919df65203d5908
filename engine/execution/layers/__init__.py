"""Replaces linears, norms, gated MLPs and rotary embeddings of a loaded model with faster modules."""
