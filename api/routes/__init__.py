"""Serves the URLs of the HTTP interface, one file for each family."""
