"""The cost of a step on the host without the model: microseconds per running sequence, by stage.

All sequences decode plain text, without stop strings and logprobs, and none begins or ends. The runner only
builds the inputs of the forward pass; tokens are drawn beforehand, which is not counted. On a busy machine,
use the first decile of the steps. `all` is CPU time, stages are wall time.

    python -m benchmarks.host_cost [--running 64 256 1024] [--tokenizer DIRECTORY]
"""

import argparse
import datetime
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.scheduler import cpu
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.runner.inputs import InputBuilder, StepInputs
from engine.execution.text.tokenizer import Tokenizer
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.text.byte_decoder import REPLACEMENT
from tests.tiny_models import make_tokenizer

RESULTS = Path(__file__).parent / "results" / "host_cost.json"
PROMPT_LEN = 64
BLOCK_SIZE = 16
STAGES = ("schedule", "inputs", "detokenize", "update", "rest", "all")


class HostRunner:
    """Builds inputs; tokens were drawn beforehand."""

    def __init__(self, config: EngineConfig, plain_ids: list[int]) -> None:
        self._inputs = InputBuilder(config.max_num_seqs, config.max_model_len, config.block_size)
        self._tokens = [
            SampledToken(one) for one in random.Random(0).choices(plain_ids, k=4 * config.max_num_seqs)
        ]
        self._num_steps = 0

    def execute(self, outputs: SchedulerOutputs) -> StepInputs:
        return self._inputs.build(outputs)

    def check(self) -> None:
        """No device."""

    def release_memory(self) -> bool:
        return False

    # The arguments are those of `engine.steps.fault_isolation.Sampler`.

    def sample(
        self,
        logits: StepInputs,  # noqa: ARG002
        items: tuple[ScheduledSequence, ...],
    ) -> list[SampledToken]:
        self._num_steps += 1
        first = self._num_steps * 37 % (len(self._tokens) - len(items))
        return self._tokens[first : first + sum(item.samples for item in items)]

    def prompt_logprobs(
        self,
        logits: StepInputs,  # noqa: ARG002
        items: tuple[ScheduledSequence, ...],  # noqa: ARG002
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        return []


def build(tokenizer: Tokenizer, num_running: int, num_steps: int) -> Engine:
    """An engine with `num_running` sequences that decode for `num_steps`."""
    num_tokens = PROMPT_LEN + num_steps + 2
    config = EngineConfig(
        max_model_len=num_tokens,
        num_kv_blocks=num_running * -(-num_tokens // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=2 * num_running * PROMPT_LEN,
        max_num_seqs=num_running,
        max_num_prefill_seqs=num_running,
    )
    texts = {one: tokenizer.decode([one]) for one in range(tokenizer.vocab_size)}
    # Incomplete characters would wait for more bytes.
    runner = HostRunner(config, [one for one, text in texts.items() if text and REPLACEMENT not in text])
    engine = Engine(
        config,
        runner,
        runner,
        tokenizer,
        eos_token_ids=frozenset(),
        vocab_size=tokenizer.vocab_size,
        clock=time.perf_counter,
    )
    for number in range(num_running):
        prompt = [number % tokenizer.vocab_size, *range(1, PROMPT_LEN)]
        engine.add(
            EngineRequest(
                f"r{number}", prompt, SamplingParams(max_tokens=num_steps + 2), arrival_time=float(number)
            )
        )
    engine.step()
    assert engine.num_running == num_running
    return engine


def step(engine: Engine) -> dict[str, float]:
    """Seconds of one step, by stage; `rest` is outside its report."""
    started, started_computing = time.perf_counter(), time.thread_time()
    report = engine.step().report
    computed, whole = time.thread_time() - started_computing, time.perf_counter() - started
    stages = {
        "schedule": report.schedule_seconds,
        "inputs": report.execute_seconds,
        "detokenize": report.detokenize_seconds,
        "update": report.update_seconds,
    }
    return {
        **stages,
        "rest": whole - report.sample_seconds - sum(stages.values()),
        "all": computed - report.sample_seconds,
    }


def measure(engine: Engine, num_steps: int) -> dict[str, dict[str, float]]:
    """Microseconds per running sequence, by stage: first decile, median and last decile of the steps."""
    num_running = engine.num_running
    steps = [step(engine) for _ in range(num_steps)]
    assert engine.num_running == num_running, "not a steady state"
    figures = {}
    for stage in STAGES:
        values = [one[stage] * 1e6 / num_running for one in steps]
        deciles = statistics.quantiles(values, n=10)
        spread = {"p10": deciles[0], "median": statistics.median(values), "p90": deciles[-1]}
        figures[stage] = {name: round(value, 3) for name, value in spread.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a step on the host, per running sequence.")
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument(
        "--tokenizer", type=Path, help="a model's directory; otherwise a small byte-level one"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the figures")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer) if args.tokenizer else Tokenizer(make_tokenizer())
    rows: list[dict[str, Any]] = []
    print("first deciles: microseconds for each running sequence, and of a whole step")
    print(f"{'running':>8}" + "".join(f"{stage:>12}" for stage in STAGES) + f"{'a step':>12}")
    for num_running in args.running:
        figures = measure(build(tokenizer, num_running, args.steps), args.steps)
        rows.append({"running": num_running, **figures})
        deciles = "".join(f"{figures[stage]['p10']:>12.2f}" for stage in STAGES)
        print(f"{num_running:>8}{deciles}{figures['all']['p10'] * num_running:>12.1f}")
    measured = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cpu": cpu(),
        "tokenizer": "byte-level" if args.tokenizer is None else args.tokenizer.name,
        "unit": "microseconds for each running sequence of a step",
        "rows": rows,
    }
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
