"""The URLs of the HTTP interface: one file for each group of routes, and the parts that they share."""
