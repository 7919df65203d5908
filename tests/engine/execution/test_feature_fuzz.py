"""Random mixes of all features on a pool that is too small: each request gives what it gives alone.

The model computes in float64, so that rounding does not depend on the batch and tokens can be compared.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.machine.async_copy import SampledIds
from engine.execution.runner.async_runner import DeviceExecutor
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.sampling.sampler import Sampler
from engine.execution.text.llguidance_backend import LlguidanceBackend
from engine.execution.text.tokenizer import Tokenizer
from engine.outputs import (
    SampledToken,
    ScheduledSequence,
    SchedulerOutputs,
    SequenceOutput,
    TokenLogprobs,
)
from engine.requests.engine_request import EngineRequest
from engine.requests.grammar_compiler import GrammarCompilerPool
from engine.sampling_params import SamplingParams
from engine.scheduling.prompt_lookup import PromptLookup
from engine.sequence import Sequence
from engine.steps.fault_isolation import ExecutedStep
from engine.steps.pipeline import AsyncExecutor
from engine.structured_outputs import StructuredOutputs
from tests.engine.execution.serving import make_runner
from tests.engine.execution.simulated_device import check_running
from tests.tiny_models import EOS, VOCAB_SIZE, make_model, make_tokenizer

PREFIX = [random.Random(0).randrange(5, VOCAB_SIZE) for _ in range(24)]
ROOMY = EngineConfig(
    max_model_len=128, num_kv_blocks=400, block_size=4, max_num_batched_tokens=512, prefix_caching=False
)
STOPS = ["e", "a", "th", "he ", "\ufffd", "<|im_end|>"]
GRAMMARS = [
    StructuredOutputs(regex="[a-z]{3,9} [0-9]+"),
    StructuredOutputs(choice=("the fox", "the dog", "nothing")),
    StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
]
TOKENIZER = Tokenizer(make_tokenizer())


@dataclass(frozen=True)
class FuzzRequest:
    prompt: list[int]
    params: SamplingParams
    priority: int
    salt: bytes


@dataclass
class OutputResult:
    """The results of one output."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None


def draw_params(rng: random.Random) -> SamplingParams:
    """Each feature in about one request of three."""

    def some(value: object, other: object) -> object:
        return value if rng.random() < 0.3 else other

    fields: dict[str, object] = {
        "n": some(rng.randint(2, 4), 1),
        "max_tokens": rng.randint(1, 14),
        "min_tokens": some(1, 0),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "top_k": some(rng.choice([1, 5, 40]), 0),
        "top_p": some(0.8, 1.0),
        "min_p": some(0.05, 0.0),
        "seed": rng.randrange(2**64),
        "presence_penalty": some(1.5, 0.0),
        "frequency_penalty": some(-0.5, 0.0),
        "repetition_penalty": some(1.8, 1.0),
        "logit_bias": some({rng.randrange(VOCAB_SIZE): 3.0, rng.randrange(VOCAB_SIZE): -100.0}, {}),
        "allowed_token_ids": some(tuple(rng.sample(range(VOCAB_SIZE), 40)), None),
        "stop_token_ids": some((rng.randrange(VOCAB_SIZE),), ()),
        "stop": some(tuple(rng.sample(STOPS, 2)), ()),
        "bad_words": some(("e", "the", "o"), ()),
        "skip_special_tokens": rng.random() < 0.5,
        "include_stop_str_in_output": rng.random() < 0.5,
        "ignore_eos": rng.random() < 0.5,
        "logprobs": some(rng.randint(0, 5), None),
        "prompt_logprobs": some(rng.randint(0, 3), None),
    }
    if rng.random() < 0.2:
        fields |= {"structured_outputs": rng.choice(GRAMMARS), "allowed_token_ids": None, "bad_words": ()}
    return SamplingParams(**fields)  # type: ignore[arg-type]  # drawn by name


def draw_requests(
    rng: random.Random, number: int, draw: Callable[[random.Random], SamplingParams] = draw_params
) -> dict[str, FuzzRequest]:
    requests = {}
    for index in range(number):
        own = [rng.randrange(5, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        prompt = PREFIX[: rng.choice([0, 0, 8, 23, 24])] + own
        requests[f"r{index}"] = FuzzRequest(
            prompt, draw(rng), rng.randrange(5), rng.choice([b"", b"", b"salt"])
        )
    return requests


def draw_plain_params(rng: random.Random) -> SamplingParams:
    """Parameters for which a step can be launched before the previous tokens are known."""
    fields: dict[str, object] = {
        "n": 2 if rng.random() < 0.2 else 1,
        "max_tokens": rng.randint(1, 24),
        "temperature": rng.choice([0.0, 0.7, 1.5]),
        "top_p": rng.choice([1.0, 0.8]),
        "seed": rng.randrange(2**64),
        "stop_token_ids": tuple(rng.sample(range(VOCAB_SIZE), 30)),
        "stop": tuple(rng.sample(STOPS, 2)) if rng.random() < 0.3 else (),
        "min_tokens": rng.choice([0, 0, 0, 2]),
        "logprobs": 1 if rng.random() < 0.08 else None,
    }
    return SamplingParams(**fields)  # type: ignore[arg-type]  # drawn by name


class CountingExecutor(DeviceExecutor):
    """Counts the steps launched while the previous one was in flight; some fail, some are refused."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, rng: random.Random) -> None:
        super().__init__(runner, sampler, torch.device("cpu"))
        self._rng = rng
        self.num_ahead = self.num_faults = self.num_refused = 0

    def can_launch(self, item: ScheduledSequence) -> bool:
        takes = super().can_launch(item) and self._rng.random() < 0.99
        self.num_refused += not takes
        return takes

    def launch(self, outputs: SchedulerOutputs, after: SampledIds | None) -> SampledIds:
        self._fail_sometimes()
        drawn = super().launch(outputs, after)
        self.num_ahead += after is not None
        return drawn

    def fetch(self, launched: SampledIds) -> list[SampledToken]:
        self._fail_sometimes()
        return super().fetch(launched)

    def _fail_sometimes(self) -> None:
        if self._rng.random() < 0.05:
            self.num_faults += 1
            raise MemoryError("not now")


def build_engine(runner: ModelRunner, config: EngineConfig, async_executor: AsyncExecutor | None) -> Engine:
    ends = frozenset({EOS})
    return Engine(
        config,
        runner,
        Sampler(),
        TOKENIZER,
        eos_token_ids=ends,
        vocab_size=VOCAB_SIZE,
        grammar_compiler=GrammarCompilerPool(
            LlguidanceBackend(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=ends),
            timeout_seconds=300.0,
        ),
        async_executor=async_executor,
    )


def serve(
    runner: ModelRunner,
    config: EngineConfig,
    requests: dict[str, FuzzRequest],
    rng: random.Random | None = None,
    async_executor: CountingExecutor | None = None,
) -> tuple[dict[tuple[str, int], OutputResult], int]:
    """All outputs by (request, index), and how often one was preempted. With `rng` they come in steps."""
    engine = build_engine(runner, config, async_executor)
    results: dict[tuple[str, int], OutputResult] = {}
    to_come = list(requests.items())
    num_preempted = arrival = 0
    while to_come or engine.has_work:
        while to_come and (rng is None or not engine.has_work or rng.random() < 0.4):
            name, request = to_come.pop(0)
            engine.add(EngineRequest(
                name, request.prompt, request.params, arrival_time=arrival, priority=request.priority,
                cache_salt=request.salt,
            ))  # fmt: skip
            arrival += 1
        step = engine.step()
        check_running(engine.scheduler.running_queue, config.block_size)
        num_preempted += step.report.num_preempted
        for output in step.outputs:
            _note(results, output)
    return results, num_preempted


def _note(results: dict[tuple[str, int], OutputResult], output: SequenceOutput) -> None:
    one = results.setdefault((output.request_id, output.index), OutputResult([], "", None, [], None))
    assert one.finish_reason is None, "nothing comes after an end"
    assert output.error is None or "no token is allowed" in output.error
    if output.token_id is not None:
        one.token_ids.append(output.token_id)
        one.logprobs.append(output.logprobs)
    one.text += output.text + output.held_text
    one.prompt_logprobs = output.prompt_logprobs or one.prompt_logprobs
    one.finish_reason = output.finish_reason.value if output.finish_reason else None


def assert_same(found: OutputResult, expected: OutputResult, label: str) -> None:
    assert (found.token_ids, found.text, found.finish_reason) == (
        expected.token_ids, expected.text, expected.finish_reason,
    ), label  # fmt: skip
    assert_close(found.logprobs, expected.logprobs, label)
    assert_close(list(found.prompt_logprobs or ()), list(expected.prompt_logprobs or ()), label)


def assert_close(found: list[TokenLogprobs | None], expected: list[TokenLogprobs | None], label: str) -> None:
    assert [one and (one.token_id, [token for token, _ in one.top]) for one in found] == [
        one and (one.token_id, [token for token, _ in one.top]) for one in expected
    ], label
    for one, other in zip(found, expected, strict=True):
        if one and other:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4), label


CONFIGS: dict[str, dict[str, Any]] = {
    "tight": {"num_kv_blocks": 22},
    "skip ahead": {"num_kv_blocks": 22, "policy": "skip_ahead", "max_num_seqs": 5},
    "no cache": {"num_kv_blocks": 22, "prefix_caching": False},
    "odd chunks": {
        "num_kv_blocks": 48,
        "max_num_batched_tokens": 13,
        "max_chunk_tokens": 5,
        "max_num_seqs": 6,
    },
    "whole prompts": {"num_kv_blocks": 22, "chunked_prefill": False, "max_num_batched_tokens": 64},
    "pins soon": {"num_kv_blocks": 22, "max_preemptions": 1},
    "tiny blocks": {
        "block_size": 2,
        "num_kv_blocks": 44,
        "max_num_batched_tokens": 9,
        "max_chunk_tokens": 3,
        "max_num_seqs": 4,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_request_in_any_mix_gives_what_it_gives_alone(name: str) -> None:
    rng = random.Random(name)
    model = make_model(dtype=torch.float64)
    requests = draw_requests(rng, 24)
    alone: dict[tuple[str, int], OutputResult] = {}
    # In float64, which the native attention does not support.
    runner = make_runner(model, ROOMY, attention="torch")
    for one, request in requests.items():
        alone |= serve(runner, ROOMY, {one: request})[0]
    limits = {"max_num_batched_tokens": 40, "max_num_seqs": 8, **CONFIGS[name]}
    config = (
        replace(ROOMY, prefix_caching=True, **limits)
        if "prefix_caching" not in limits
        else replace(ROOMY, **limits)
    )
    mixed, num_preempted = serve(make_runner(model, config, attention="torch"), config, requests, rng)
    assert mixed.keys() == alone.keys()
    for key, expected in alone.items():
        assert_same(mixed[key], expected, f"{key}: {requests[key[0]].params}")
    assert num_preempted or name == "odd chunks", "the pool was to be too small"


@pytest.mark.parametrize("name", CONFIGS)
def test_asynchronous_steps_change_no_output(name: str) -> None:
    """Plain requests with a few of any kind, on a device that sometimes fails."""
    rng = random.Random(name)
    model = make_model(dtype=torch.float64)
    requests = draw_requests(rng, 30, draw_plain_params)
    requests |= {f"odd {one}": request for one, request in draw_requests(rng, 3).items()}
    config = replace(
        ROOMY, **{"prefix_caching": True, "max_num_batched_tokens": 40, "max_num_seqs": 8, **CONFIGS[name]}
    )
    in_order, _ = serve(make_runner(model, config, attention="torch"), config, requests, random.Random(1))
    runner = make_runner(model, config, attention="torch")
    async_executor = CountingExecutor(runner, Sampler(), rng)
    ahead, _ = serve(runner, config, requests, random.Random(1), async_executor)
    assert ahead.keys() == in_order.keys()
    for key, expected in in_order.items():
        assert_same(ahead[key], expected, f"{key}: {requests[key[0]].params}")
    assert async_executor.num_ahead > 20
    assert async_executor.num_faults
    assert async_executor.num_refused


class GuidedLookup(PromptLookup):
    """Drafts the tokens that will be sampled, with random errors. Otherwise as prompt lookup."""

    expected: ClassVar[dict[tuple[str, int], OutputResult]]
    rng: ClassVar[random.Random]
    counts: ClassVar[Counter[str]]

    def draft(self, maximum: int) -> tuple[int, ...]:
        found = super().draft(maximum)
        one = self.expected[self.sequence.request_id, self.sequence.index]
        right = one.token_ids[self.sequence.num_output_tokens :][: max(0, maximum)]
        if self.rng.random() < 0.2 or not right:
            return found
        return tuple(
            token_id if self.rng.random() < 0.8 else self.rng.randrange(VOCAB_SIZE) for token_id in right
        )

    def adapt(self, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted
        self.counts.update(drafted=num_drafted, accepted=num_accepted, all=num_accepted == num_drafted)
        super().adapt(num_drafted, num_accepted)


@pytest.fixture
def guided(monkeypatch: pytest.MonkeyPatch) -> type[GuidedLookup]:
    monkeypatch.setattr("engine.scheduling.drafts.PromptLookup", GuidedLookup)
    monkeypatch.setattr("engine.scheduling.drafts.MAX_ROWS", 40)
    GuidedLookup.rng, GuidedLookup.counts = random.Random(5), Counter()
    return GuidedLookup


def draft_config(name: str) -> EngineConfig:
    """A larger pool than without drafts, which are made only while no sequence waits for blocks."""
    limits = {"max_num_batched_tokens": 40, **CONFIGS[name], "max_num_seqs": 4}
    limits["num_kv_blocks"] *= 4
    limits["max_num_batched_tokens"] = max(24, limits["max_num_batched_tokens"])
    return replace(ROOMY, **{"prefix_caching": True, "num_speculative_tokens": 7, **limits})


@pytest.mark.parametrize("draw", [draw_params, draw_plain_params])
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_change_no_output(
    name: str, draw: Callable[[random.Random], SamplingParams], guided: type[GuidedLookup]
) -> None:
    """Tokens, texts, log-probabilities and reasons are those of a request alone, without drafts."""
    rng = random.Random(name)
    model = make_model(dtype=torch.float64)
    requests = draw_requests(rng, 24, draw)
    runner = make_runner(model, ROOMY, attention="torch")
    guided.expected = {}
    for one, request in requests.items():
        guided.expected |= serve(runner, ROOMY, {one: request})[0]
    config = draft_config(name)
    drafted, _ = serve(make_runner(model, config, attention="torch"), config, requests, rng)
    assert drafted.keys() == guided.expected.keys()
    for key, expected in guided.expected.items():
        assert_same(drafted[key], expected, f"{key}: {requests[key[0]].params}")
    if draw is draw_plain_params:
        assert guided.counts["drafted"] > guided.counts["accepted"] > guided.counts["all"] > 0


def test_a_wrong_draft_that_is_accepted_is_found(
    guided: type[GuidedLookup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""

    def accept_all(
        drafts: Mapping[Sequence, tuple[int, ...]],
        sampled: Iterable[tuple[Sequence, SampledToken]],
        executed: ExecutedStep,
    ) -> None:
        for sequence, token in sampled:
            if executed.tokens.setdefault(sequence, token) is not token:
                executed.accepted.setdefault(sequence, []).append(token)

    monkeypatch.setattr("engine.steps.fault_isolation.verify", accept_all)
    with pytest.raises(AssertionError, match="SamplingParams"):
        test_drafts_change_no_output("tight", draw_plain_params, guided)
