"""Speaks HTTP: connections, request heads, deadlines."""
