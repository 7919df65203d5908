"""Turns token ids into text: whole characters and stop strings."""
