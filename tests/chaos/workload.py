"""An endless list of requests that follows from a seed. Pure.

All kinds of requests alternate, so that a short list contains each. Lengths and words are random.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from api.schemas.requests import TaskBody
from tests.tiny_models import CORPUS, VOCAB_SIZE

WORDS = " ".join(CORPUS).split()
OFFERED = frozenset(TaskBody.model_fields)
"""The request fields that the API accepts."""
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.8},
    {"top_k": 20},
    {"min_p": 0.05},
    {"n": 3},
    {"frequency_penalty": 0.6, "temperature": 0},
    {"structured_outputs": {"regex": "[a-z ]{60,90}"}},
)
"""Sampling fields of sampled requests, one entry after another."""
LONGEST = 300
PERSISTENT_READERS = ("sse", "token_stream", "poll")
READERS = (*PERSISTENT_READERS, "disconnecter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request and the behaviour of its client.

    `reader`: one of READERS. `cancel_at`: cancel after this number of messages; 0: before reading.
    `disconnect_at`: disconnect after this number of messages, which ends the task. `key`: Idempotency-Key.
    `resubmits`: submit the same again. `has_webhook`: ask for a webhook.
    """

    number: int
    body: Mapping[str, Any]
    reader: str
    cancel_at: int | None = None
    disconnect_at: int | None = None
    key: str | None = None
    resubmits: bool = False
    has_webhook: bool = False

    @property
    def may_end_as(self) -> frozenset[str]:
        """A request may complete before its cancel or disconnect takes effect."""
        is_cut_off = self.cancel_at is not None or self.disconnect_at is not None
        return frozenset({"completed", "cancelled"} if is_cut_off else {"completed"})

    @property
    def is_greedy(self) -> bool:
        return bool(self.body["temperature"] == 0)

    def __str__(self) -> str:
        kind = "greedy" if self.is_greedy else "sampled"
        cancelled = "" if self.cancel_at is None else f", cancelled at {self.cancel_at}"
        cancelled += "" if self.disconnect_at is None else f", left at {self.disconnect_at}"
        return f"request {self.number} ({kind}, {self.reader}{cancelled})"


def requests(seed: int) -> Iterator[Request]:
    return (request(seed, number) for number in count())


def request(seed: int, number: int) -> Request:
    chance = Random(f"{seed}:{number}")
    has_key = number % 4 != 3
    body = _sampled(seed, number // 4) if number % 4 == 1 else _greedy(chance, number)
    leaves = number % 7 == 2
    if leaves:
        body["on_disconnect"] = "cancel"
    return Request(
        number=number,
        body=body,
        reader="disconnecter" if leaves else PERSISTENT_READERS[number % 3],
        cancel_at=chance.choice((0, 0, 1, chance.randint(2, 60))) if number % 7 == 4 else None,
        disconnect_at=chance.choice((0, 1, chance.randint(2, 20))) if leaves else None,
        key=f"request-{number}" if has_key else None,
        resubmits=has_key and number % 2 == 0,
        has_webhook=number % 5 == 1,
    )


def _greedy(chance: Random, number: int) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": _length(chance), "priority": chance.randint(1, 3)}
    if number % 5 == 2:
        body["messages"] = [{"role": "user", "content": _words(chance, 12)}]
    elif number % 5 == 3:
        body["prompt_token_ids"] = [chance.randrange(5, VOCAB_SIZE) for _ in range(chance.randint(3, 120))]
    else:
        body["prompt"] = _words(chance, 30)
    if number % 3 == 0:
        body["stop"] = [chance.choice("aeiou"), chance.choice(("th", "er", "qu"))]
    if number % 6 != 5:
        body["ignore_eos"] = True
    if number % 11 == 6 and "n" in OFFERED:
        body["n"] = 2
    if number % 2 == 0 and "timeout_seconds" in OFFERED:
        # Longer than any run, and shorter than the skew of a worker's clock.
        body["timeout_seconds"] = 3600.0
    return body


def _sampled(seed: int, number: int) -> dict[str, Any]:
    extras = [extra for extra in EXTRAS if extra.keys() <= OFFERED]
    variant = number % len(extras)
    chance = Random(f"{seed}:sampled:{variant}")
    return {
        "prompt": _words(chance, 15),
        "temperature": chance.choice((0.5, 0.8, 1.2)),
        "seed": chance.getrandbits(60),
        "max_tokens": _length(chance),
        "ignore_eos": True,
        **extras[variant],
    }


def _length(chance: Random) -> int:
    """Number of tokens: many short requests, and some that run during several faults."""
    return chance.randint(4, 60) if chance.random() < 0.3 else chance.randint(60, LONGEST)


def _words(chance: Random, most: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, most)))
