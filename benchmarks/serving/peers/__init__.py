"""One program for each engine, run in the engine's own environment; see `benchmarks/serving/protocol.py`."""
