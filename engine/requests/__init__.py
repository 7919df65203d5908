"""Holds each request from `Engine.add` to its finish: checks, outputs, deadlines, stop rules, grammars."""
