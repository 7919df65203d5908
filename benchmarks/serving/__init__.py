"""Tokenmill beside other engines, on one machine: the same models, prompts, lengths, threads and limits.

`python -m benchmarks.serving` measures; `python -m benchmarks.serving.environments` makes the environments.
"""
