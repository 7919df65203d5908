"""The figures of a load: percentiles, throughput, goodput, errors. Seconds everywhere."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenmill.bench.outcomes import Load, Outcome

PERCENTILES = (50, 90, 95, 99)
METRICS: dict[str, Callable[[Outcome], float | None]] = {
    "ttft": lambda outcome: outcome.ttft,
    "tpot": lambda outcome: outcome.tpot,
    "e2el": lambda outcome: outcome.seconds,
}
"""What an objective of goodput can limit, by the names that vLLM uses: the time to the first token, the mean
time for each further token, the end-to-end latency."""


def figures(load: Load, slos: Mapping[str, float] | None = None) -> dict[str, Any]:
    """`slos`: name in `METRICS` -> the most seconds that a request may take to count for goodput."""
    done = [outcome for outcome in load.outcomes if outcome.succeeded]
    seconds = load.seconds or float("inf")
    output_tokens = sum(one.num_tokens for one in done)
    prompt_tokens = _total(one.prompt_tokens for one in done)
    return {
        "seconds": load.seconds,
        "interrupted": load.interrupted,
        "requests": {
            "total": len(load.outcomes),
            "completed": len(done),
            "failed": len(load.outcomes) - len(done),
        },
        "tokens": {
            "prompt": prompt_tokens,
            "output": output_tokens,
            "chunks": sum(len(one.times) for one in done),
            "counted_by": "server" if all(one.output_tokens is not None for one in done) else "chunks",
        },
        "per_second": {
            "requests": len(done) / seconds,
            "output_tokens": output_tokens / seconds,
            "total_tokens": (output_tokens + (prompt_tokens or 0)) / seconds,
        },
        "ttft_seconds": distribution([one.ttft for one in done if one.ttft is not None]),
        "inter_token_seconds": distribution([gap for one in done for gap in one.gaps]),
        "tpot_seconds": distribution([one.tpot for one in done if one.tpot is not None]),
        "end_to_end_seconds": distribution([one.seconds for one in done]),
        "goodput": _goodput(done, slos, seconds) if slos else None,
        "generator": {
            "cpu_seconds": load.cpu_seconds,
            "cpu_share": load.cpu_seconds / seconds,
            "max_start_lag_seconds": max((one.lag for one in load.outcomes), default=0.0),
        },
        "errors": _errors(load.outcomes),
    }


def distribution(values: list[float]) -> dict[str, float] | None:
    """Mean, extremes and percentiles; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": sum(ordered) / len(ordered),
        "min": ordered[0],
        **{f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES},
        "max": ordered[-1],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, interpolated between neighbours as by numpy."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def per_request(load: Load) -> list[dict[str, Any]]:
    """One row for each request, in the order of their starts."""
    return [
        {
            "started": outcome.started,
            "ttft_seconds": outcome.ttft,
            "seconds": outcome.seconds,
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.output_tokens,
            "chunks": len(outcome.times),
            "error": outcome.error[0] if outcome.error else None,
        }
        for outcome in load.outcomes
    ]


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _goodput(done: list[Outcome], slos: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Completed requests that met every objective. One without a value, as with one token, meets it."""
    good = sum(
        all((METRICS[name](outcome) or 0.0) <= limit for name, limit in slos.items()) for outcome in done
    )
    return {
        "slos_seconds": dict(slos),
        "requests": good,
        "requests_per_second": good / seconds,
        "share": good / len(done) if done else 0.0,
    }


def _errors(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Each kind with its number and one message, the most frequent first."""
    failed = [outcome.error for outcome in outcomes if outcome.error]
    examples = dict(reversed(failed))
    counts = Counter(kind for kind, _ in failed)
    return [{"kind": kind, "count": count, "example": examples[kind]} for kind, count in counts.most_common()]
