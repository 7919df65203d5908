"""The waiting sequences and their order."""
