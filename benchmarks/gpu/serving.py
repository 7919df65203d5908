"""Whole models: the engine with each backend, with and without graphs, and transformers.

All serve the same prompts and numbers of tokens greedily: in bfloat16 for timing, in float32 for comparison.
"""

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.attention import backend_named
from benchmarks.gpu.parts import Options
from benchmarks.gpu.timing import wait_for
from benchmarks.serving.make_model import make_model
from benchmarks.serving.peers.tokenmill import Tokenmill
from benchmarks.serving.peers.transformers_continuous import Continuous
from benchmarks.serving.peers.transformers_generate import Generate
from benchmarks.serving.protocol import Peer, Request, Served, Settings
from benchmarks.serving.shapes import BYTES, MODELS, read_shape
from benchmarks.serving.workloads import WARM_UP, make_workload

DTYPE = "bfloat16"
MAX_SEQS = 64
TOKEN_BUDGET = 2048
MAX_MODEL_LEN = 1024
QUICK_REQUESTS, QUICK_TOKENS = 3, 8
COMPARED = 6
"""Compared requests; the reference serves them one by one."""
DECODE_PROMPT, DECODE_TOKENS = 128, 96
"""Tokens of each sequence whose decode steps are timed."""
PEERS: dict[str, tuple[type[Generate] | type[Continuous], dict[str, Any]]] = {
    "generate": (Generate, {"batch_size": 16}),
    "continuous": (Continuous, {}),
}


def models(options: Options, name: str) -> dict[str, Any]:
    """Write a model's directory."""
    return {"directory": str(_directory(options, name))}


def tokens(options: Options, name: str, attention: str, has_graphs: bool) -> dict[str, Any]:
    """Compare greedy float32 tokens with transformers' generate. `wrong`: requests that differ.

    On a GPU a near tie may be decided otherwise, late in a request: see `first_difference`.
    """
    requests = _requests(options, name, repeat=0)[:COMPARED]
    own = _engine_options(options, attention, has_graphs)
    ours, _ = _served(Tokenmill(), options, name, own, requests, "float32")
    right, _ = _served(Generate(), options, name, {"batch_size": 1}, requests, "float32")
    differences: dict[str, int] = {}
    for place, (one, other) in enumerate(zip(ours, right, strict=True)):
        pairs = enumerate(zip(one.tokens, other.tokens, strict=True))
        at = next((at for at, (mine, its) in pairs if mine != its), None)
        if at is not None:
            differences[f"request {place}"] = at
    return {"requests": len(requests), "first_difference": differences, "wrong": list(differences)}


def ours(options: Options, name: str, attention: str, has_graphs: bool) -> dict[str, Any]:
    """Tokens per second, the time of a decode step, and its bandwidth relative to a copy."""
    engine = Tokenmill()
    own = _engine_options(options, attention, has_graphs)
    return {**_rate(engine, options, name, own), **_decode_steps(engine, options, name)}


def theirs(options: Options, name: str, peer: str) -> dict[str, Any]:
    make, own = PEERS[peer]
    return _rate(make(), options, name, own)


def _directory(options: Options, name: str) -> Path:
    return make_model(name, Path(options.cache) / "bench" / "models")


def _engine_options(options: Options, attention: str, has_graphs: bool) -> dict[str, Any]:
    """Raises `Absent`."""
    backend_named(attention, options)
    return {"attention": attention, "decode_graphs": has_graphs}


def _rate(peer: Peer, options: Options, name: str, own: dict[str, Any]) -> dict[str, Any]:
    requests = _requests(options, name, repeat=0)
    served, description = _served(peer, options, name, own, requests, DTYPE)
    seconds = max(one.times[-1] for one in served)
    num_tokens = sum(one.max_tokens for one in requests)
    return {
        "details": description,
        "requests": len(requests),
        "output_tokens": num_tokens,
        "run_seconds": round(seconds, 4),
        "tokens_per_second": round(num_tokens / seconds, 1),
        "first_tokens": [one.tokens[:16] for one in served[:4]],
    }


def _served(
    peer: Peer,
    options: Options,
    name: str,
    own: dict[str, Any],
    requests: list[Request],
    dtype: str,
) -> tuple[list[Served], dict[str, Any]]:
    """The peer's tokens, after a warm-up with requests of the same lengths, and its description of itself."""
    directory = _directory(options, name)
    settings = Settings(
        model=str(directory),
        dtype=dtype,
        threads=1 if options.device == "cpu" else 4,
        token_budget=TOKEN_BUDGET,
        max_seqs=MAX_SEQS,
        max_model_len=MAX_MODEL_LEN,
        kv_tokens=MAX_SEQS * MAX_MODEL_LEN,
        kv_bytes=MAX_SEQS * MAX_MODEL_LEN * read_shape(directory).kv_elements * BYTES[dtype],
        scratch=options.cache,
        options=own,
        device=options.device,
    )
    description = peer.load(settings)
    peer.run(_requests(options, name, repeat=WARM_UP)[: len(requests)])
    wait_for(options.device)
    served = peer.run(requests)
    _check(served, requests)
    return served, description


def _check(served: list[Served], requests: list[Request]) -> None:
    got = [len(one.tokens) for one in served]
    wanted = [one.max_tokens for one in requests]
    if got != wanted:
        raise RuntimeError(f"it returned {got} tokens, not {wanted}")


def _requests(options: Options, name: str, repeat: int) -> list[Request]:
    workload = make_workload(
        "mixed",
        vocab_size=read_shape(_directory(options, name)).vocab_size,
        repeat=repeat,
        num_requests=MODELS[name].num_requests,
    )
    if not options.quick:
        return list(workload.requests)
    few = workload.first(QUICK_REQUESTS).requests
    return [Request(one.prompt, QUICK_TOKENS) for one in few]


def _decode_steps(engine: Tokenmill, options: Options, name: str) -> dict[str, Any]:
    """The median time of a step in which all sequences decode: `MAX_SEQS` of them, and one."""
    shape = read_shape(_directory(options, name))
    length = QUICK_TOKENS if options.quick else DECODE_TOKENS
    found: dict[str, Any] = {}
    for count in (2,) if options.quick else (1, MAX_SEQS):
        requests = [
            Request([10 + (at + slot) % 1000 for at in range(DECODE_PROMPT)], length) for slot in range(count)
        ]
        served = engine.run(requests)
        seconds = _median_step(served)
        read = shape.weights + count * (DECODE_PROMPT + length // 2) * shape.kv_elements
        figures = {"milliseconds": round(seconds * 1e3, 4)}
        if options.copy_rate:
            figures["bandwidth_share"] = round(read * BYTES[DTYPE] / seconds / options.copy_rate, 4)
        found[f"decode step of {count}"] = figures
    return found


def _median_step(served: list[Served]) -> float:
    """Seconds between two tokens in the middle of the last sequence, when all decode."""
    return statistics.median(late - early for early, late in pairwise(served[-1].times))
