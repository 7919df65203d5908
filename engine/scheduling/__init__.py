"""Decides which sequences the next step computes, with how many tokens, and in which slots and KV blocks."""
