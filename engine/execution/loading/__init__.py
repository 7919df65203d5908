"""Finds, loads and checks a model, and resolves the limits of the engine."""
