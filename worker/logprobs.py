"""Log-probabilities as clients read them: beside each id its text and its bytes.

Law: what comes out is JSON to every parser, and bytes tell tokens apart whose texts are the same. Knows no
sampler.
"""

import math
from collections.abc import Callable
from typing import Any

from engine.outputs import SequenceOutput, TokenLogprobs

LEAST = -9999.0
"""In the place of minus infinity, which JSON has no number for (as OpenAI's interface has it)."""


class LogprobsWriter:
    """`token_bytes` gives what a token stands for; half a character for some."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes

    def members(self, output: SequenceOutput) -> dict[str, Any]:
        """What a token's message has beyond the token; empty where no logprobs were asked for."""
        members: dict[str, Any] = {}
        if output.logprobs is not None:
            members["logprobs"] = self._described(output.logprobs)
        if output.prompt_logprobs is not None:
            members["prompt_logprobs"] = [
                None if one is None else {"id": one.token_id, **self._described(one)}
                for one in output.prompt_logprobs
            ]
        return members

    def _described(self, logprobs: TokenLogprobs) -> dict[str, Any]:
        top = [{"id": token_id, **self._spelt(token_id, logprob)} for token_id, logprob in logprobs.top]
        return {**self._spelt(logprobs.token_id, logprobs.logprob), "top": top}

    def _spelt(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelling = self._token_bytes(token_id)
        return {
            "logprob": logprob if math.isfinite(logprob) else LEAST,
            "token": spelling.decode("utf-8", "replace"),
            "bytes": list(spelling),
        }
