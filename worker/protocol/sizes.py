"""How much one task may tell: its log is read as one by every poll, claim and late reader."""

MAX_TOLD = 1 << 18
"""Tokens and log-probabilities of all outputs together."""


def num_told(num_tokens: int, logprobs: int | None) -> int:
    """What `num_tokens` come to, each with its own and `logprobs` other log-probabilities where asked for."""
    return num_tokens * (1 if logprobs is None else 2 + logprobs)
