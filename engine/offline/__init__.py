"""Runs a list of prompts without a service."""
