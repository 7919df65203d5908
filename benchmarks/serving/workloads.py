"""Defines the workloads: prompts, numbers of tokens, arrival times.

A workload is a function of its name, the vocabulary and the repeat. All repeats have the same lengths and
arrivals; tokens differ, or a prefix cache would serve every repeat but the first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

from benchmarks.serving.protocol import Request

FIRST_TOKEN_ID = 10
"""The ids below are special tokens in most vocabularies."""
NUM_REQUESTS = 64
NUM_CHATS = 28
LONG_PROMPTS = (1024, 2048, 3072, 4096)
SHARED_TOKENS = 256
WARM_UP = -1
"""The number of the repeat that is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`shared_tokens`: with which all prompts begin alike. `load`: the share of capacity that arrives in an
    open loop; None: all at once."""

    name: str
    requests: tuple[Request, ...]
    shared_tokens: int = 0
    load: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    def first(self, count: int) -> "Workload":
        """Its first requests alone."""
        return replace(self, requests=self.requests[:count])


class Lengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    output: int


def mixed_lengths(random: Random, count: int) -> list[Lengths]:
    return [Lengths(random.randint(16, 256), random.randint(16, 128)) for _ in range(count)]


def one_stream_lengths(_: Random, __: int) -> list[Lengths]:
    return [Lengths(128, 128)]


def long_lengths(random: Random, count: int) -> list[Lengths]:
    """Chats, and one long prompt after each equal share of them."""
    chats = mixed_lengths(random, max(1, count * NUM_CHATS // NUM_REQUESTS))
    longs = [Lengths(prompt, random.randint(16, 64)) for prompt in LONG_PROMPTS]
    share = -(-len(chats) // len(longs))
    lined_up: list[Lengths] = []
    for place, long in enumerate(longs):
        lined_up += [*chats[place * share : (place + 1) * share], long]
    return lined_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the workloads of one name have in common. `title`: without the number of requests, which is each
    run's own."""

    title: str
    lengths: Callable[[Random, int], list[Lengths]]
    shared_tokens: int = 0
    load: float | None = None


KINDS = {
    "mixed": Kind(
        title="prompts of 16 to 256 tokens, outputs of 16 to 128, all at once", lengths=mixed_lengths
    ),
    "shared-prefix": Kind(
        title="the mixed requests, each behind the same 256 tokens",
        lengths=mixed_lengths,
        shared_tokens=SHARED_TOKENS,
    ),
    "one-stream": Kind(title="one stream alone, 128 tokens in and out", lengths=one_stream_lengths),
    "open-50": Kind(title="open loop at 50 % of capacity", lengths=mixed_lengths, load=0.5),
    "open-80": Kind(title="open loop at 80 % of capacity", lengths=mixed_lengths, load=0.8),
    "open-110": Kind(title="open loop at 110 % of capacity", lengths=mixed_lengths, load=1.1),
    "long-and-chats": Kind(
        title="four prompts of 1,024 to 4,096 tokens among chats, all at once", lengths=long_lengths
    ),
}


def make_workload(
    name: str,
    *,
    vocab_size: int,
    repeat: int,
    num_requests: int = NUM_REQUESTS,
    requests_per_second: float | None = None,
) -> Workload:
    """`requests_per_second`: what is called capacity in an open loop, which needs it."""
    kind = KINDS[name]
    lengths = lengths_of(kind, num_requests)
    arrivals = [0.0] * len(lengths)
    if kind.load is not None:
        if requests_per_second is None:
            raise ValueError(f"{name}: the capacity is not known")
        arrivals = poisson(Random("arrivals"), len(lengths), kind.load * requests_per_second)
    tokens = Random(f"tokens {name} {repeat}")

    def draw(count: int) -> list[int]:
        return [tokens.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(count)]

    shared = draw(kind.shared_tokens)
    requests = tuple(
        Request([*shared, *draw(length.prompt)], length.output, arrival)
        for length, arrival in zip(lengths, arrivals, strict=True)
    )
    return Workload(name=name, requests=requests, shared_tokens=kind.shared_tokens, load=kind.load)


def lengths_of(kind: Kind, num_requests: int) -> list[Lengths]:
    """From a generator of their own, so that they do not depend on the repeat."""
    return kind.lengths(Random(f"lengths {kind.lengths.__name__}"), num_requests)


def count_requests(name: str, num_requests: int) -> int:
    """How many a workload has that was asked for with `num_requests`: not all kinds have as many."""
    return len(lengths_of(KINDS[name], num_requests))


def poisson(random: Random, count: int, per_second: float) -> list[float]:
    """The moments of `count` arrivals, the first at 0."""
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + random.expovariate(per_second))
    return moments
