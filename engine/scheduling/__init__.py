"""Decides which tokens, slots and KV blocks the next step uses."""
