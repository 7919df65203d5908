"""Computes the results of one run from the arrival times of tokens, and the statistics of several runs.

Units are seconds and tokens.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from benchmarks.serving.protocol import Request, Served

PERCENTILES = (50, 90, 99)


class Spread(NamedTuple):
    """Of several runs."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def percentile(values: Sequence[float], percent: float) -> float:
    """With a straight line between the two nearest ranks. NaN of no values."""
    if not values:
        return math.nan
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By name: p50 and so on; nothing of no values."""
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTILES} if values else {}


def first_token_seconds(requests: Sequence[Request], served: Sequence[Served]) -> list[float]:
    """From the arrival of each request to its first token."""
    return [
        one.times[0] - request.arrival for request, one in zip(requests, served, strict=True) if one.times
    ]


def inter_token_seconds(served: Sequence[Served]) -> list[float]:
    """Between one token of a request and its next, of all requests."""
    return [
        later - earlier for one in served for earlier, later in zip(one.times, one.times[1:], strict=False)
    ]


def total_seconds(served: Sequence[Served]) -> float:
    """From the beginning of the run to the last token."""
    return max(one.times[-1] for one in served if one.times)


def run_figures(requests: Sequence[Request], served: Sequence[Served]) -> dict[str, object]:
    """Of one run. Raises `ValueError` when a request has not exactly its tokens."""
    for place, (request, one) in enumerate(zip(requests, served, strict=True)):
        if len(one.tokens) != request.max_tokens or len(one.times) != request.max_tokens:
            raise ValueError(
                f"request {place}: {len(one.tokens)} tokens with {len(one.times)} times,"
                f" not {request.max_tokens}"
            )
    seconds = total_seconds(served)
    tokens = sum(len(one.tokens) for one in served)
    return {
        "seconds": seconds,
        "output_tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "requests_per_second": len(requests) / seconds,
        "first_token_seconds": percentiles(first_token_seconds(requests, served)),
        "inter_token_seconds": percentiles(inter_token_seconds(served)),
    }


class Agreement(NamedTuple):
    """With the reference. `tokens`: those before the first that differs, of `of_tokens`."""

    requests: int
    of_requests: int
    tokens: int
    of_tokens: int


def agreement(reference: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> Agreement:
    """Of those requests that the reference has, which are the first ones."""
    compared = list(zip(reference, tokens, strict=False))
    alike = [alike_tokens(ours, theirs) for theirs, ours in compared]
    return Agreement(
        requests=sum(count == len(theirs) for count, (theirs, _) in zip(alike, compared, strict=True)),
        of_requests=len(compared),
        tokens=sum(alike),
        of_tokens=sum(len(theirs) for theirs, _ in compared),
    )


def alike_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))
