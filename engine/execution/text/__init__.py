"""Wraps the tokenizer of a model, and compiles grammars over its tokens with llguidance."""
