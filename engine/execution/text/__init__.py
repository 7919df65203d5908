"""Wraps the tokenizer, the bytes of tokens and the grammar library."""
