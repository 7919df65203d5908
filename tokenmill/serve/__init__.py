"""Runs the service on one machine: supervisor and embedded Redis."""
