"""Captures decode steps once and replays them."""
