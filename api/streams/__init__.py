"""Reads the events of tasks, live or from the log, and formats them as server-sent events."""
