"""Runs batches: reads their lines, submits them as tasks, and stores the results."""
