"""Describes request bodies and replies."""
