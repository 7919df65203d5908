"""The cost of each sampling feature for a batch: `python -m benchmarks.sampler [--cache DIRECTORY]`.

One decode step after the forward pass: 64 rows of a vocabulary of 49,152, each request with a prompt of 512
tokens and 128 output tokens. All cases take turns in one run, so that other load affects each of them. Writes
`benchmarks/results/sampler.json`.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.constraints import Constraints
from engine.execution.machine.native_library import find_library
from engine.execution.sampling.native_draw import DrawOperator, choose_draw_operator
from engine.execution.sampling.sampler import Sampler
from engine.outputs import ScheduledSequence
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

ROWS, VOCAB, PROMPT, OUTPUT = 64, 49_152, 512, 128
RESULTS = Path(__file__).parent / "results" / "sampler.json"
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5}


class RandomGrammar:
    """Allows a random half of the vocabulary."""

    is_complete = False

    def __init__(self, random: np.random.Generator) -> None:
        self._bits = random.integers(-(2**31), 2**31, size=-(-VOCAB // 32), dtype=np.int32)

    def advance(self, token_ids: list[int]) -> None:
        pass

    def fill_bitmask(self, row: Any) -> None:
        row[:] = self._bits


GREEDY: dict[str, Any] = {"temperature": 0.0}
TOP_P: dict[str, Any] = {"top_p": 0.9}
UNFILTERED: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """All rows have the parameters `base`, the first `num_rows` also `more`; compared with `plain`."""

    name: str
    plain: str
    base: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    num_rows: int = ROWS
    grammar: bool = False


CASES = [
    Case("greedy", "greedy", GREEDY),
    Case("top-p", "top-p", TOP_P),
    Case("unfiltered", "unfiltered", UNFILTERED),
    Case("greedy, penalties on 1 row", "greedy", GREEDY, PENALTIES, 1),
    Case("greedy, penalties", "greedy", GREEDY, PENALTIES),
    Case("greedy, bias of 20 tokens", "greedy", GREEDY, {"logit_bias": dict.fromkeys(range(9, 29), 1.5)}),
    Case("greedy, grammar", "greedy", GREEDY, grammar=True),
    Case("greedy, logprobs=5", "greedy", GREEDY, {"logprobs": 5}),
    Case("top-p, penalties on 1 row", "top-p", TOP_P, PENALTIES, 1),
    Case("top-p, penalties", "top-p", TOP_P, PENALTIES),
    Case("unfiltered, penalties on 1 row", "unfiltered", UNFILTERED, PENALTIES, 1),
    Case("unfiltered, penalties", "unfiltered", UNFILTERED, PENALTIES),
]


def make_items(case: Case, random: np.random.Generator) -> tuple[ScheduledSequence, ...]:
    items: list[ScheduledSequence] = []
    for row in range(ROWS):
        sequence = Sequence(
            f"{case.name} {row}",
            random.integers(0, VOCAB, PROMPT).tolist(),
            SamplingParams(seed=row, **case.base, **(case.more if row < case.num_rows else {})),
            arrival_time=0.0,
            constraints=Constraints(grammar=RandomGrammar(random) if case.grammar else None),
        )
        sequence.token_ids += random.integers(0, VOCAB, OUTPUT).tolist()
        sequence.admit(row)
        items.append(ScheduledSequence(sequence, 0, 1, 0, True))
    return tuple(items)


def measure(num_rounds: int, operator: DrawOperator | None) -> dict[str, list[float]]:
    """CPU seconds of each round, by case, without the first, in which counts and masks are built."""
    random = np.random.default_rng(0)
    # Peaked as a model's logits: top-p 0.9 keeps tens of tokens.
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 2.0
    logits[:, ::500] += 12.0
    batches = [(case, Sampler(operator), make_items(case, random)) for case in CASES]
    seconds: dict[str, list[float]] = {case.name: [] for case in CASES}
    for number in range(num_rounds + 1):
        for case, sampler, items in batches:
            started = time.process_time()
            tokens = sampler.sample(logits, items)
            took = time.process_time() - started
            if number:
                seconds[case.name].append(took)
            for item, token in zip(items, tokens, strict=True):
                assert token.token_id is not None
                item.sequence.append(token.token_id)
    return seconds


def summarize(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Medians, first and last deciles, and the ratio to the plain case."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows: list[dict[str, Any]] = []
    for case in CASES:
        tenths = statistics.quantiles(seconds[case.name], n=10)
        rows.append(
            {
                "case": case.name,
                "median_ms": round(medians[case.name] * 1e3, 3),
                "p10_ms": round(tenths[0] * 1e3, 3),
                "p90_ms": round(tenths[-1] * 1e3, 3),
                "plain": case.plain,
                "ratio_to_plain": round(medians[case.name] / medians[case.plain], 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--cache", type=Path, help="where native operators are compiled; by default torch draws"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    operator = choose_draw_operator(find_library(arguments.cache, print))
    rows = summarize(measure(arguments.rounds, operator))
    for row in rows:
        print(
            f"{row['case']:36} {row['median_ms']:9.3f} ms"
            f"  ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})  {row['ratio_to_plain']:5.2f} x {row['plain']}"
        )
    setup = {"rows": ROWS, "vocabulary": VOCAB, "prompt_tokens": PROMPT, "output_tokens": OUTPUT}
    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    report = {**setup, **machine, "threads": arguments.threads, "rounds": arguments.rounds}
    report |= {"native": operator is not None, "cases": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
