"""Reads the tool calls in a model's text as the text arrives."""
