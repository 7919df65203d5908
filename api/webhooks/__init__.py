"""Delivers signed webhooks when tasks end."""
