"""How much one task may produce: its log is read as one by every poll, claim and late reader.

The one rule for API and worker. A task is not refused for the output it may come to: its outputs end with
`length` at the limit, and the task shows the limit.
"""

import json
from dataclasses import asdict, dataclass
from typing import Literal

MAX_TOLD = 1 << 18
"""Tokens and log-probabilities of all outputs together."""

BoundBy = Literal["max_tokens", "generation_config", "model_length", "output_size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimit:
    """The most tokens that each output of a task gets.

    `requested`: `max_tokens` as the client gave it. `bound_by`: what sets `max_tokens`: the request's own
    value, the model's default, the room that the prompt leaves, or `MAX_TOLD`.
    """

    max_tokens: int
    requested: int | None
    bound_by: BoundBy

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def num_told(num_tokens: int, logprobs: int | None) -> int:
    """What `num_tokens` come to, each with its own and `logprobs` other log-probabilities where asked for."""
    return num_tokens * (1 if logprobs is None else 2 + logprobs)


def output_limit(
    *,
    requested: int | None,
    default: int | None,
    room: int | None,
    n: int,
    logprobs: int | None,
) -> OutputLimit:
    """The limit of each of `n` outputs. `default`: the model's `max_tokens`, used where none is `requested`.

    `room`: tokens that the prompt leaves of the model's length; None: not known.
    """
    candidates: list[tuple[int, BoundBy]] = [(max(1, MAX_TOLD // (n * num_told(1, logprobs))), "output_size")]
    if room is not None:
        candidates.insert(0, (max(1, room), "model_length"))
    if requested is not None:
        candidates.insert(0, (requested, "max_tokens"))
    elif default is not None:
        candidates.insert(0, (default, "generation_config"))
    # Of equal ones the first: what was asked for is not said to be cut.
    max_tokens, bound_by = min(candidates, key=lambda one: one[0])
    return OutputLimit(max_tokens=max_tokens, requested=requested, bound_by=bound_by)


def prompt_logprobs_fit(num_prompt_tokens: int, prompt_logprobs: int | None) -> bool:
    """Whether those of so long a prompt may be told: they cannot be cut short."""
    return prompt_logprobs is None or num_told(num_prompt_tokens, prompt_logprobs) <= MAX_TOLD


def prompt_logprobs_error(num_prompt_tokens: int) -> str:
    return (
        f"of {num_prompt_tokens} tokens are more than {MAX_TOLD} numbers; shorten the prompt or ask for fewer"
    )
