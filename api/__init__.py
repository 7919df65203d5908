"""HTTP in; HTTP and event streams out."""
