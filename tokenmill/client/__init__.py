"""Clients of a running service: HTTP, and token streams from Redis."""
