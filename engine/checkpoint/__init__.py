"""Checks a model directory by its files alone, before any library is loaded. Standard library only."""
