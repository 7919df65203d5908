"""Delivers signed webhooks."""
