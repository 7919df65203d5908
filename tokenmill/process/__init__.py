"""What the API, the worker and the commands share as processes: startup, environment variables, log lines."""
