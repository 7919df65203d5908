"""Reads and checks the files of a model directory before any library is loaded. Standard library only."""
