"""RQ jobs in, token events out."""
