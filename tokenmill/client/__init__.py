"""Speaks to a running service: HTTP client and stream readers."""
