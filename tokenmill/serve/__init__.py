"""What `tokenmill serve` runs: a supervisor of Redis, the workers and the API, on one machine."""
