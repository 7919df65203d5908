"""Adapts to this machine: memory, copies, device errors, cache files, the compiled library."""
