"""Limits of one task: how much output it may produce, and how many seconds it may take.

The API and the worker apply the same rules.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Literal

from tokenmill.protocol.messages import TaskError

MAX_OUTPUT_VALUES = 1 << 18
"""Tokens and logprobs that all outputs of a task may have together: polls, claims and late readers read the
whole log at once.
"""

MAX_LIMIT_SECONDS = 366 * 86400.0
"""The longest time limit. The engine has the same bound."""

SECONDS_PLACEHOLDER = "{}"
"""Stands for the seconds in an error message; a script fills it in."""

BoundBy = Literal["max_tokens", "generation_config", "model_length", "output_size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLimit:
    """The maximum number of tokens of each output of a task.

    `requested`: `max_tokens` of the request. `bound_by`: what determines the limit: the request's value, the
    model's default, the context length left by the prompt, or `MAX_OUTPUT_VALUES`.
    """

    max_tokens: int
    requested: int | None
    bound_by: BoundBy

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def output_limit(
    *,
    requested: int | None,
    default: int | None,
    room: int | None,
    n: int,
    logprobs: int | None,
) -> OutputLimit:
    """Return the limit of each of `n` outputs. An output that reaches it ends with `length`.

    `default`: the model's `max_tokens`, used where the request has none. `room`: tokens of the context length
    that the prompt leaves; None if unknown.
    """
    per_output = MAX_OUTPUT_VALUES // (n * num_output_values(1, logprobs))
    candidates: list[tuple[int, BoundBy]] = [(max(1, per_output), "output_size")]
    if room is not None:
        candidates.insert(0, (max(1, room), "model_length"))
    if requested is not None:
        candidates.insert(0, (requested, "max_tokens"))
    elif default is not None:
        candidates.insert(0, (default, "generation_config"))
    # On a tie the first wins: a request that gets all it asked for is not reported as cut.
    max_tokens, bound_by = min(candidates, key=lambda candidate: candidate[0])
    return OutputLimit(max_tokens=max_tokens, requested=requested, bound_by=bound_by)


def num_output_values(num_tokens: int, logprobs: int | None) -> int:
    """Tokens and logprobs of `num_tokens` tokens: each has its own logprob and `logprobs` alternatives."""
    return num_tokens * (1 if logprobs is None else 2 + logprobs)


def prompt_logprobs_fit(num_prompt_tokens: int, prompt_logprobs: int | None) -> bool:
    """Whether the prompt's logprobs stay within `MAX_OUTPUT_VALUES`: they cannot be truncated."""
    if prompt_logprobs is None:
        return True
    return num_output_values(num_prompt_tokens, prompt_logprobs) <= MAX_OUTPUT_VALUES


def prompt_logprobs_error(num_prompt_tokens: int) -> str:
    return (
        f"of {num_prompt_tokens} prompt tokens are more than {MAX_OUTPUT_VALUES} values; "
        "shorten the prompt or request fewer"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Time limits of a request in seconds since its acceptance; None means no limit.

    `queue_timeout_seconds`: until a step first runs the task. `ttft_timeout_seconds`: until its first token.
    `timeout_seconds`: until its end. Raises ValueError for a value outside 0 to `MAX_LIMIT_SECONDS`.
    """

    queue_timeout_seconds: float | None = None
    ttft_timeout_seconds: float | None = None
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            # NaN fails every comparison.
            if seconds is not None and not 0 <= seconds <= MAX_LIMIT_SECONDS:
                raise ValueError(f"{field.name}: seconds, 0 to {MAX_LIMIT_SECONDS:.0f}, not {seconds}")


NO_LIMITS = TimeLimits()

_UNMET = {
    "queue_timeout_seconds": "not started",
    "ttft_timeout_seconds": "no token",
    "timeout_seconds": "not done",
}
TIME_LIMIT_NAMES = tuple(_UNMET)


def timeout_error(name: str, seconds: str = SECONDS_PLACEHOLDER) -> TaskError:
    """The error of a task whose limit `name` passed while it waited. The engine uses the same wording."""
    message = f"{_UNMET[name]} within {name} ({seconds} s)"
    return TaskError(type="timeout_error", code="timeout", message=message)
