"""Reports in, Prometheus out. Watches the service and never takes part in it."""
