"""Random mixes of requests on a simulated device, each compared with the same request alone."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import NeverFits
from engine.outputs import ResumedOutput, SequenceOutput
from engine.requests.deadlines import NO_DEADLINES, Deadlines
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.steps.pipeline import AsyncExecutor
from tests.engine.execution.simulated_device import (
    NUM_TOKENS,
    RefusingExecutor,
    SimulatedDevice,
    check_running,
)
from tests.engine.fakes import EOS, VOCAB_SIZE, Clock, WordTokenizer

Key = tuple[str, int]


@dataclass(frozen=True)
class MixRequest:
    prompt: list[int]
    params: SamplingParams
    priority: int = 2
    deadlines: Deadlines = NO_DEADLINES


@dataclass
class OutputResult:
    """The results of one output."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    end: str | None = None
    error: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None


@dataclass(frozen=True)
class Mix:
    config: EngineConfig
    requests: dict[str, MixRequest]


def draw_mix(rng: random.Random, *, is_tiny: bool) -> Mix:
    """Requests that together exceed a pool, with tiny or ordinary blocks; half of them request logprobs."""
    block_size = rng.choice([1, 2, 2, 4]) if is_tiny else 16
    num_blocks = rng.randint(3, 12) if is_tiny else rng.randint(4, 12)
    capacity = block_size * num_blocks
    config = EngineConfig(
        max_model_len=rng.randint(max(4, capacity // 2), 2 * capacity),
        num_kv_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=rng.randint(1, 12) if is_tiny else rng.choice([16, 64, 128]),
        max_num_seqs=rng.randint(2, 6) if is_tiny else rng.randint(2, 12),
        max_num_prefill_seqs=rng.choice([None, None, 1, 3]),
        chunked_prefill=rng.random() < 0.8,
        prefix_caching=rng.random() < 0.7,
        policy=rng.choice(["fifo", "skip_ahead"]),
        max_preemptions=rng.choice([0, 2, 5, 5]),
        prefill_reserve=rng.choice([0.0, 0.0, 0.4]),
        max_chunk_tokens=rng.choice([None, None, None, 1, 3]),
    )
    longest = max(2, capacity // rng.choice([2, 3, 4]))
    shared = [1 + rng.randrange(NUM_TOKENS) for _ in range(longest)]
    number = rng.choice([2, 3, 3, 4, 6])
    requests = {f"r{n}": _draw_request(rng, shared, longest) for n in range(number)}
    return Mix(config, requests)


def _draw_request(rng: random.Random, shared: list[int], longest: int) -> MixRequest:
    prompt = shared[: rng.choice([0, 0, longest // 2, longest])]
    prompt += [1 + rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, max(1, longest // 2)))]
    params = SamplingParams(
        n=rng.choice([1] * 8 + [2, 3]),
        max_tokens=rng.randint(max(1, longest // 2), 3 * longest),
        seed=rng.randrange(2**32),
        min_tokens=rng.choice([0, 0, 1]),
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=0 if rng.random() < 0.05 else None,
        stop=(f"<{1 + rng.randrange(NUM_TOKENS)}>",) if rng.random() < 0.1 else (),
    )
    limit = rng.choice([None] * 12 + ["queue_timeout_seconds", "ttft_timeout_seconds", "timeout_seconds"])
    deadlines = Deadlines(**{limit: rng.uniform(1.0, 40.0)}) if limit else NO_DEADLINES
    return MixRequest(prompt, params, rng.choice([2, 2, 2, 2, rng.randrange(5)]), deadlines)


class Served:
    """An engine on a simulated device and everything it reported. Each step is checked."""

    def __init__(
        self, config: EngineConfig, device: Any, async_executor: AsyncExecutor | None = None
    ) -> None:
        self.clock = Clock()
        self.engine = Engine(
            config,
            device,
            device,
            WordTokenizer(),
            eos_token_ids=frozenset({EOS}),
            vocab_size=VOCAB_SIZE,
            async_executor=async_executor,
            clock=self.clock,
        )
        self.results: dict[Key, OutputResult] = {}
        self.num_preempted = self.num_steps = 0
        self._num_added = 0

    def add(self, name: str, request: MixRequest, resumed: tuple[ResumedOutput, ...] = ()) -> None:
        """Raises `NeverFits`."""
        self._num_added += 1
        self.engine.add(
            EngineRequest(
                name,
                request.prompt,
                request.params,
                arrival_time=float(self._num_added),
                priority=request.priority,
                deadlines=request.deadlines,
                resumed=resumed,
            )
        )

    def step(self, only: str | None = None) -> tuple[SequenceOutput, ...]:
        self.num_steps += 1
        assert self.num_steps < 20_000, "the work never ends"
        step = self.engine.step(only)
        check_running(self.engine.scheduler.running_queue, self.engine.config.block_size)
        self.num_preempted += step.report.num_preempted
        for output in step.outputs:
            self._note(output)
        return step.outputs

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        blocks = self.engine.scheduler.block_manager
        assert blocks.num_free_blocks == blocks.num_kv_blocks, "blocks leak"
        assert not blocks.prefix_cache.num_unverified, "blocks that no sampled row has read stay findable"

    def _note(self, output: SequenceOutput) -> None:
        one = self.results.setdefault((output.request_id, output.index), OutputResult())
        assert one.end is None, "output after an end"
        if output.token_id is not None:
            one.tokens.append(output.token_id)
            one.logprobs.append(output.logprobs)
        one.text += output.text + output.held_text
        one.prompt_logprobs = output.prompt_logprobs or one.prompt_logprobs
        one.end = output.finish_reason.value if output.finish_reason else None
        one.error = output.error


def serve_alone(
    config: EngineConfig, name: str, request: MixRequest, poison: int | None = None
) -> dict[Key, OutputResult]:
    """The request alone in an engine without prefix cache and asynchronous scheduling."""
    config = replace(config, prefix_caching=False)
    served = Served(config, SimulatedDevice(config, random.Random(0), poison=poison))
    served.add(name, replace(request, deadlines=NO_DEADLINES))
    served.run()
    return served.results


@dataclass
class Counts:
    """What happened in a run, so that a test can assert that it did."""

    num_compared: int = 0
    num_preempted: int = 0
    num_ahead: int = 0
    num_refused: int = 0
    num_faults: int = 0
    num_glitches: int = 0
    ends: dict[str, int] = field(default_factory=dict)


def run_mix(seed: int, counts: Counts, *, is_tiny: bool, glitch_rate: float = 0.0) -> None:
    """One mix under asynchronous scheduling; each output equals the one of its request alone.

    With `glitch_rate` values come out as not finite at random: outputs may fail then, and afterwards each
    prompt is served again in the same engine, where none may.
    """
    rng = random.Random(seed)
    mix = draw_mix(rng, is_tiny=is_tiny)
    poison = rng.choice([None] * 9 + [1 + rng.randrange(NUM_TOKENS)])
    device = SimulatedDevice(mix.config, rng, poison=poison, glitch_rate=glitch_rate)
    async_executor = RefusingExecutor(
        device, rng, refused=rng.choice([0.0, 0.0, 0.0, 0.05, 0.3]), fault_rate=rng.choice([0.0, 0.0, 0.05])
    )
    served = Served(mix.config, device, async_executor)
    taken = _drive(served, mix, rng)
    counts.num_preempted += served.num_preempted
    counts.num_ahead += async_executor.num_ahead
    counts.num_refused += async_executor.num_refused
    counts.num_faults += async_executor.num_faults
    counts.num_glitches += device.num_glitches
    expected = {name: serve_alone(mix.config, name, taken[name], poison) for name in taken}
    for (name, index), found in served.results.items():
        counts.num_compared += 1
        counts.ends[str(found.end)] = counts.ends.get(str(found.end), 0) + 1
        compare(found, expected[name][name, index], f"seed {seed}: {name}/{index}", may_fail=glitch_rate > 0)
    if glitch_rate:
        device.glitch_rate = 0.0
        _serve_again(served, taken, expected)


def _serve_again(
    served: Served, taken: dict[str, MixRequest], expected: dict[str, dict[Key, OutputResult]]
) -> None:
    for name, request in taken.items():
        served.add(f"again {name}", replace(request, deadlines=NO_DEADLINES))
        served.run()
        for (_, index), one in expected[name].items():
            compare(served.results[f"again {name}", index], one, f"{name}/{index}, served again")


def _drive(served: Served, mix: Mix, rng: random.Random) -> dict[str, MixRequest]:
    """Add, cancel, isolate and step at random until all have ended; returns the accepted requests."""
    engine = served.engine
    to_come = list(mix.requests.items())
    taken: dict[str, MixRequest] = {}
    while to_come or engine.has_work:
        while to_come and (not engine.has_work or rng.random() < 0.4):
            name, request = to_come.pop(0)
            try:
                served.add(name, request)
                taken[name] = request
            except NeverFits:
                pass
        if not engine.has_work:
            continue
        if rng.random() < 0.01:
            engine.cancel(rng.choice(list(mix.requests)))
        served.clock.now += rng.choice([0.1, 0.5, 1.0])
        only = rng.choice(list(taken)) if rng.random() < 0.005 else None
        served.step(only)
        if rng.random() < 0.01:
            engine.drain()
    served.run()
    return taken


def compare(found: OutputResult, expected: OutputResult, label: str, *, may_fail: bool = False) -> None:
    """`found` equals `expected`; an output that was ended from outside is a prefix of it."""
    number = len(found.tokens)
    is_cut = found.end in ("cancelled", "timeout") or (may_fail and found.end == "error")
    if is_cut:
        assert found.tokens == expected.tokens[:number], label
        assert expected.text.startswith(found.text) or not number, label
    else:
        assert (found.tokens, found.text, found.end) == (expected.tokens, expected.text, expected.end), label
        assert found.error == expected.error, label
    assert found.logprobs == expected.logprobs[:number], label
    if found.prompt_logprobs is not None and not may_fail:
        assert found.prompt_logprobs == expected.prompt_logprobs, label
