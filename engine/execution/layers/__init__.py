"""Replaces linears, norms, gates and rotary embeddings in a loaded model."""
