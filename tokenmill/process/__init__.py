"""What the API, the worker and the commands share as processes: startup, restarts, outages of Redis."""
