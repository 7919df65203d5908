"""Finds, loads and checks a model, and sizes its KV pool."""
