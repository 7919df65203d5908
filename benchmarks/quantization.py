"""Quality, memory and speed of 8-bit and 4-bit weights: `python -m benchmarks.quantization CACHE_DIR`.

Compared with plain weights, through the runner of the service: the mean KL divergence of the logits on
`texts/ferry.txt`, in nats per token; the ratio of the perplexities; how often both have the same most likely
token; the memory of the weights; and tokens per second of a forward pass by its number of rows.

The default model's weights come from a 4-bit file with the group size used here, so quantizing them to 4 bits
changes them little. So a copy is measured too, in which each weight of a linear layer is moved at random
within its rounding step, as in a model that was never quantized. Writes `results/quantization.json`.
"""

import argparse
import json
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from engine.execution.build import Execution, build_execution
from engine.execution.layers.quantized_weights import GROUP
from engine.execution.loading.default_model import default_model
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

TEXT = Path(__file__).parent / "texts" / "ferry.txt"
RESULTS = Path(__file__).parent / "results" / "quantization.json"
BLOCK_SIZE, NUM_BLOCKS = 16, 80
CHUNK = 256
ROWS = (1, 8, 64, 256)
NUM_REPEATS = 5
QUANTIZATIONS = ("none", "int8", "int4")


class Divergence(NamedTuple):
    """From the plain model, on one text. `mean_kl`: nats per token. `same_top`: share of the tokens."""

    mean_kl: float
    perplexity_ratio: float
    same_top: float


class Loaded(NamedTuple):
    """`memory`: the log line about the size of the weights; empty for plain ones."""

    execution: Execution
    memory: str


def load(model: Path, cache_dir: Path, quantization: str) -> Loaded:
    lines: list[str] = []
    execution = build_execution(
        str(model),
        cache_dir=cache_dir,
        device="cpu",
        quantization=quantization,
        block_size=BLOCK_SIZE,
        num_kv_blocks=NUM_BLOCKS,
        max_num_batched_tokens=CHUNK,
        progress=lines.append,
    )
    return Loaded(execution, next((line for line in lines if "MB instead of" in line), ""))


def logits_of(execution: Execution, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], computed by the runner in chunks."""
    sequence = _sequence(token_ids)
    starts = range(0, len(token_ids), CHUNK)
    return torch.cat([_forward(execution, sequence, start).float() for start in starts])


def _sequence(token_ids: list[int]) -> Sequence:
    """A sequence with the first blocks of the pool."""
    sequence = Sequence("text", token_ids, SamplingParams(), arrival_time=0.0)
    sequence.admit(0)
    sequence.block_table = list(range(1, -(-len(token_ids) // BLOCK_SIZE) + 1))
    return sequence


def _forward(execution: Execution, sequence: Sequence, start: int) -> torch.Tensor:
    """The logits of one chunk."""
    count = min(CHUNK, len(sequence.token_ids) - start)
    item = ScheduledSequence(sequence, start, count, 0, False)
    logits: torch.Tensor = execution.runner.execute(SchedulerOutputs(prefill=(item,), released_slots=(0,)))
    return logits


def divergence(plain: torch.Tensor, other: torch.Tensor, token_ids: list[int]) -> Divergence:
    """Of `other` from `plain`, both [tokens, vocabulary]."""
    expected, found = plain.log_softmax(-1), other.log_softmax(-1)
    following = torch.tensor(token_ids[1:])[:, None]
    loss = (expected[:-1].gather(1, following) - found[:-1].gather(1, following)).mean()
    return Divergence(
        mean_kl=float((expected.exp() * (expected - found)).sum(1).mean()),
        perplexity_ratio=float(loss.exp()),
        same_top=float((plain.argmax(1) == other.argmax(1)).float().mean()),
    )


def undo_rounding(source: Path, directory: Path) -> Path:
    """A copy of the model in `source` whose linear weights are moved by up to half a step, in float32."""
    copy = directory / "unrounded"
    shutil.copytree(source, copy)
    generator = torch.Generator().manual_seed(0)
    for file in copy.glob("*.safetensors"):
        weights = {name: weight.float() for name, weight in load_file(file).items()}
        for name, weight in weights.items():
            if name.endswith("proj.weight"):
                groups = weight.view(-1, GROUP)
                step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 15
                groups += (torch.rand(groups.shape, generator=generator) - 0.5) * step
        save_file(weights, file, metadata={"format": "pt"})
    return copy


def rates(executions: dict[str, Execution], num_rows: int) -> dict[str, float]:
    """Rows per second of a forward pass with logits of all rows; the executions take turns."""
    fastest = dict.fromkeys(executions, float("inf"))
    sequence = _sequence(list(range(1, num_rows + 1)))
    for _ in range(NUM_REPEATS):
        for name, execution in executions.items():
            began = time.perf_counter()
            _forward(execution, sequence, 0)
            fastest[name] = min(fastest[name], time.perf_counter() - began)
    return {name: round(num_rows / seconds, 1) for name, seconds in fastest.items()}


def quality(model: Path, cache_dir: Path) -> dict[str, object]:
    """The divergence of each quantization, with one model in memory at a time."""
    plain = load(model, cache_dir, "none").execution
    token_ids = plain.tokenizer.encode(TEXT.read_text())
    expected = logits_of(plain, token_ids)
    del plain
    found: dict[str, object] = {}
    for quantization in QUANTIZATIONS[1:]:
        execution, memory = load(model, cache_dir, quantization)
        measured = divergence(expected, logits_of(execution, token_ids), token_ids)
        found[quantization] = {**measured._asdict(), "memory": memory}
    return {"tokens": len(token_ids), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description="Quality, memory and speed of 8-bit and 4-bit weights.")
    parser.add_argument("cache_dir", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the figures")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = default_model(args.cache_dir, print)
    measured: dict[str, object] = {"default": quality(model, args.cache_dir)}
    with tempfile.TemporaryDirectory() as directory:
        measured["unrounded"] = quality(undo_rounding(model, Path(directory)), args.cache_dir)
    print(json.dumps(measured, indent=1), flush=True)
    executions = {
        quantization: load(model, args.cache_dir, quantization).execution for quantization in QUANTIZATIONS
    }
    measured["tokens_per_second_by_rows"] = {rows: rates(executions, rows) for rows in ROWS}
    measured["machine"] = {
        "cpu": platform.processor() or platform.machine(),
        "threads": args.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(measured, indent=2) + "\n")
    print(json.dumps(measured["tokens_per_second_by_rows"], indent=1))


if __name__ == "__main__":
    main()
