"""The tasks in Redis, read and changed by Lua scripts."""
