"""Executes scheduling decisions: pipelining, fault isolation and step reports."""
