"""The HTTP API: accepts tasks and returns their state, their results and live streams of their tokens."""
