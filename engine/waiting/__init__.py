"""Holds waiting sequences and decides whose turn is next."""
