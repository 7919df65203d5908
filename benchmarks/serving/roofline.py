"""Computes the floor of a workload: the minimum time in which this machine can serve it.

Each step reads all weights once and the keys and values of its sequences once, and computes its products,
both at the best measured rates and at the same time. Everything else is assumed to cost nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.serving.protocol import Request
from benchmarks.serving.shapes import BYTES, Shape
from benchmarks.serving.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured: bytes per second of reading as much as the weights are, and of reading more than any
    cache holds; operations per second of products of matrices."""

    weights_bytes_per_second: float
    memory_bytes_per_second: float
    flops_per_second: float


@dataclass(slots=True)
class Part:
    """One sequence's share of a step: `new` tokens after `computed` ones. `samples`: a token comes of it."""

    computed: int
    new: int
    samples: bool


@dataclass(slots=True)
class _Sequence:
    request: Request
    #: Prompt tokens that are read from the cache, because another sequence computed them.
    computed: int
    emitted: int = 0

    @property
    def known(self) -> int:
        return len(self.request.prompt) + self.emitted

    @property
    def is_over(self) -> bool:
        return self.emitted == self.request.max_tokens


def steps(workload: Workload, *, token_budget: int, max_seqs: int) -> Iterator[list[Part]]:
    """What an ideal scheduler computes: decodes first, prompts in order as far as the budget goes. A shared
    prefix is computed once. All requests are there from the beginning."""
    waiting = [
        _Sequence(request, computed=workload.shared_tokens if place else 0)
        for place, request in enumerate(workload.requests)
    ]
    running: list[_Sequence] = []
    while waiting or running:
        while waiting and len(running) < max_seqs:
            running.append(waiting.pop(0))
        yield list(_step(running, token_budget))
        running = [one for one in running if not one.is_over]


def _step(running: list[_Sequence], left: int) -> Iterator[Part]:
    for one in sorted(running, key=lambda one: one.emitted == 0):
        new = min(left, one.known - one.computed)
        if not new:
            continue
        left -= new
        samples = one.computed + new == one.known
        yield Part(one.computed, new, samples)
        one.computed += new
        one.emitted += samples


def step_seconds(parts: list[Part], shape: Shape, rates: Rates, dtype: str, shared_tokens: int = 0) -> float:
    """The longer of reading and computing. `shared_tokens` of each context are read once for all."""
    size = BYTES[dtype]
    contexts = [part.computed + part.new for part in parts]
    shared = min([shared_tokens, *contexts])
    kv = (sum(contexts) - shared * (len(parts) - 1)) * shape.kv_elements * size
    sampled = sum(part.samples for part in parts)
    weights = (shape.layer_weights + (shape.head_weights if sampled else 0)) * size
    reading = weights / rates.weights_bytes_per_second + kv / rates.memory_bytes_per_second
    return max(reading, flops(parts, shape) / rates.flops_per_second)


def flops(parts: list[Part], shape: Shape) -> float:
    """Two for each weight and token; in attention four for each query element and token attended to."""
    new = sum(part.new for part in parts)
    # A token attends to those before it and to itself.
    pairs = sum(part.new * part.computed + part.new * (part.new + 1) / 2 for part in parts)
    sampled = sum(part.samples for part in parts)
    return 2 * new * shape.layer_weights + 2 * sampled * shape.head_weights + 4 * pairs * shape.score_elements


def floor_seconds(
    workload: Workload, shape: Shape, rates: Rates, dtype: str, *, token_budget: int, max_seqs: int
) -> float:
    """Of a workload that is there at once; in an open loop arrivals decide, and this is only the work."""
    return sum(
        step_seconds(parts, shape, rates, dtype, workload.shared_tokens)
        for parts in steps(workload, token_budget=token_budget, max_seqs=max_seqs)
    )
