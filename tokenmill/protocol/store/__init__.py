"""Reads and changes tasks in Redis by Lua scripts."""
