"""What is asked of the service, without end: one seed gives one list. Pure.

Law: every kind comes in turn, so that a short list has all of them; lengths and words are left to chance.
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
"""What this service can be asked for."""
EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.8},
    {"top_k": 20},
    {"min_p": 0.05},
    {"n": 3},
    {"frequency_penalty": 0.6, "temperature": 0},
    {"structured_outputs": {"regex": "[a-z ]{60,90}"}},
)
"""Each makes one body that the likeliest tokens alone do not judge."""
LONGEST = 300
STAYING = ("sse", "token_stream", "poll")
READERS = (*STAYING, "leaver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """One client's wish, and how it goes about it.

    `reader`: one of READERS. `cancel_at`: messages after which the task is cancelled; 0 before it is read.
    `leave_at`: messages after which the client closes its connection, and the task is to end by that.
    `key`: its Idempotency-Key. `resubmits`: the same submission is made again. `has_webhook`: somebody is to
    be told of its end.
    """

    number: int
    body: Mapping[str, Any]
    reader: str
    cancel_at: int | None = None
    leave_at: int | None = None
    key: str | None = None
    resubmits: bool = False
    has_webhook: bool = False

    @property
    def may_end_as(self) -> frozenset[str]:
        """One that is cut off may have ended before."""
        is_cut_off = self.cancel_at is not None or self.leave_at is not None
        return frozenset({"completed", "cancelled"} if is_cut_off else {"completed"})

    @property
    def is_greedy(self) -> bool:
        return bool(self.body["temperature"] == 0)

    def __str__(self) -> str:
        kind = "greedy" if self.is_greedy else "sampled"
        cancelled = "" if self.cancel_at is None else f", cancelled at {self.cancel_at}"
        cancelled += "" if self.leave_at is None else f", left at {self.leave_at}"
        return f"request {self.number} ({kind}, {self.reader}{cancelled})"


def errands(seed: int) -> Iterator[Errand]:
    return (errand(seed, number) for number in count())


def errand(seed: int, number: int) -> Errand:
    chance = Random(f"{seed}:{number}")
    has_key = number % 4 != 3
    body = _sampled(seed, number // 4) if number % 4 == 1 else _greedy(chance, number)
    leaves = number % 7 == 2
    if leaves:
        body["on_disconnect"] = "cancel"
    return Errand(
        number=number,
        body=body,
        reader="leaver" if leaves else STAYING[number % 3],
        cancel_at=chance.choice((0, 0, 1, chance.randint(2, 60))) if number % 7 == 4 else None,
        leave_at=chance.choice((0, 1, chance.randint(2, 20))) if leaves else None,
        key=f"errand-{number}" if has_key else None,
        resubmits=has_key and number % 2 == 0,
        has_webhook=number % 5 == 1,
    )


def _greedy(chance: Random, number: int) -> dict[str, Any]:
    body = {"temperature": 0, "max_tokens": _length(chance), "priority": chance.randint(1, 3)}
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
        # Longer than any run takes, and shorter than a worker's clock is wrong.
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
    """Tokens: many short ones, some that run through several faults."""
    return chance.randint(4, 60) if chance.random() < 0.3 else chance.randint(60, LONGEST)


def _words(chance: Random, most: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, most)))
