"""Runs a scheduling decision: pipelining, fault isolation and the step report."""
