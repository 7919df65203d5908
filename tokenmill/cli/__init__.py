"""The commands of `tokenmill`."""
