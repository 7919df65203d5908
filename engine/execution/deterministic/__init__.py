"""Computes bit-identical results whatever else is in the batch."""
