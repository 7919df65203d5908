"""A record of results with figures of round numbers."""

from typing import Any

from benchmarks.serving.plan import SMOLLM2, Cell
from benchmarks.serving.systems import OURS

OUR_CELL = Cell(SMOLLM2, "float32", "mixed", OURS)
FACTS: dict[str, Any] = {
    "begun": "today",
    "machine": {"cpu": "a", "cores": 2, "flags": ["avx2"], "memory_bytes": 2**34, "commit": "abc"},
    "limits": {"threads": 2, "token_budget": 512, "max_seqs": 64},
}


def figures(tokens_per_second: float, requests: int = 64, **more: Any) -> dict[str, Any]:
    """Of one run of 100 tokens."""
    percentiles = {"p50": 0.1, "p90": 0.15, "p99": 0.19}
    return {
        "seconds": 100 / tokens_per_second,
        "output_tokens": 100,
        "tokens_per_second": tokens_per_second,
        "requests_per_second": requests * tokens_per_second / 100,
        "first_token_seconds": percentiles,
        "inter_token_seconds": percentiles,
        "cpu_seconds": 1.0,
        "other_cpu_seconds": 0.0,
        "peak_bytes": 2**20,
        **more,
    }
