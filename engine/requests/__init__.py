"""Follows one request from add() to its end: checks, outputs, deadlines, stop rules, grammar."""
