"""Which items are launched without the host, and how the device resolves placeholders."""

from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.constraints import Constraints
from engine.execution.deterministic.runner import DeterministicRunner
from engine.execution.runner.async_runner import AsyncRunner, DeviceExecutor
from engine.execution.runner.inputs import InputBuilder
from engine.execution.sampling.sampler import NON_FINITE, Sampler
from engine.outputs import SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.execution.serving import GREEDY, in_slot, make_runner, part
from tests.tiny_models import make_model

CONFIG = EngineConfig(max_model_len=32, num_kv_blocks=16, block_size=4)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class NeverRun:
    def execute(self, outputs: SchedulerOutputs, drawn: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError

    def check(self) -> None:
        raise AssertionError

    def release_memory(self) -> bool:
        raise AssertionError


def can_launch(device: torch.device, samples: bool = True, output: int = 1, **params: object) -> bool:
    sequence = Sequence("a", [1, 2, 3], SamplingParams(**params), arrival_time=0.0)  # type: ignore[arg-type]
    sequence.token_ids += [4] * output
    return DeviceExecutor(NeverRun(), Sampler(), device).can_launch(part(sequence, 0, 3, 2, samples))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.5, "min_p": 0.1, "seed": 3},
        {"min_tokens": 1},
        {"stop": ("a",), "stop_token_ids": (3,), "n": 3},
    ],
)
def test_items_that_are_launched_on_every_device(params: dict[str, Any]) -> None:
    assert can_launch(CPU, **params)
    assert can_launch(CUDA, **params)


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": (3,)},
        {"min_tokens": 2},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
    ],
)
def test_items_that_need_the_host(params: dict[str, Any]) -> None:
    assert not can_launch(CPU, **params)
    assert not can_launch(CUDA, **params)
    assert can_launch(CPU, samples=False, **params) == ("prompt_logprobs" not in params)


def test_bad_words_need_the_host() -> None:
    sequence = Sequence("a", [1], GREEDY, arrival_time=0.0, constraints=Constraints(bad_token_ids=((3,),)))
    assert not DeviceExecutor(NeverRun(), Sampler(), CPU).can_launch(part(sequence, 0, 1, 0, samples=True))


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.9}])
def test_top_k_and_top_p_need_the_host_on_a_gpu(params: dict[str, Any]) -> None:
    assert can_launch(CPU, **params)
    assert not can_launch(CUDA, **params)


def with_tokens(runner: AsyncRunner, tokens: tuple[int, int], drawn: list[int] | None) -> torch.Tensor:
    """The logits of the fourth token of two sequences."""
    sequences = [in_slot(slot, [5 + slot, 6, 7, tokens[slot]], [1 + slot]) for slot in (0, 1)]
    prompts = tuple(part(one, 0, 3, 3) for one in sequences)
    runner.execute(SchedulerOutputs(prefill=prompts))
    decodes = tuple(part(one, 3, 4, 0, samples=True) for one in sequences)
    step = SchedulerOutputs(decode=decodes)
    return runner.execute(step) if drawn is None else runner.execute(step, torch.tensor(drawn))


@pytest.mark.parametrize("kind", ["plain", "deterministic"])
def test_a_placeholder_is_replaced_by_its_drawn_token(kind: str) -> None:
    model = make_model("llama")
    runner: AsyncRunner = make_runner(model, CONFIG, attention="torch")
    if kind == "deterministic":
        plain = make_runner(model, CONFIG, attention="torch")
        builder = InputBuilder(CONFIG.max_num_seqs, CONFIG.max_model_len, CONFIG.block_size)
        runner = DeterministicRunner(model, plain._backend, builder, (1, 2, 4))
    known = with_tokens(runner, (11, 12), None)
    assert torch.equal(with_tokens(runner, (-3, -1), [12, 99, 11]), known)
    assert torch.equal(with_tokens(runner, (11, -2), [99, 12]), known)
    assert not torch.equal(with_tokens(runner, (-2, -1), [11, 12]), known), "swapped"


def test_a_drawn_error_is_computed_as_token_0() -> None:
    runner = make_runner(make_model("llama"), CONFIG, attention="torch")
    assert torch.equal(with_tokens(runner, (-2, -1), [12, -1]), with_tokens(runner, (0, 12), None))


def test_fetched_tokens_are_those_of_the_sampler() -> None:
    sampler = Sampler()
    logits = torch.randn(70, 300, generator=torch.Generator().manual_seed(0))
    logits[3, 5] = torch.nan
    params = [
        SamplingParams(temperature=one % 3 * 0.5, seed=one, top_p=0.5 + one % 2 / 2) for one in range(70)
    ]
    sequences = [in_slot(slot, [1, 2], [1], one) for slot, one in enumerate(params)]
    items = tuple(part(one, 1, 2, 0, samples=True) for one in sequences)
    fetched = sampler.fetch(sampler.draw(logits, items))
    assert fetched == sampler.sample(logits, items)
    assert fetched[3].error == NON_FINITE
    chunk = (part(sequences[0], 0, 1, 1),)
    assert sampler.fetch(sampler.draw(logits[:0], chunk)) == []
