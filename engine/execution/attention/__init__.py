"""Computes paged attention: interface, backends, KV pool and probe."""
