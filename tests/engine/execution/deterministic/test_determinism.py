"""In deterministic mode, logits are bit-identical whatever else is in the batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import UnsupportedModel
from engine.execution.attention.interface import ATTENTION_NAME, install
from engine.execution.attention.probe import record_layers
from engine.execution.build import build_execution
from engine.execution.deterministic.attention import DeterministicAttention
from engine.execution.deterministic.experts import use_whole_rows
from engine.execution.deterministic.runner import DeterministicRunner, next_size, pad_inputs, split
from engine.execution.deterministic.self_check import agreeing_row_counts
from engine.execution.runner.inputs import InputBuilder
from engine.execution.sampling.sampler import Sampler
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.steps.fault_isolation import Runner
from tests.engine.execution.pools import cpu_shape
from tests.engine.execution.serving import NumberText, in_slot, make_prompts, make_runner, part
from tests.tiny_models import VOCAB_SIZE, make_model

ALONE = EngineConfig(max_model_len=160, num_kv_blocks=40, block_size=4, max_num_seqs=1, prefix_caching=False)
ROOMY = EngineConfig(max_model_len=160, num_kv_blocks=2000, block_size=4, max_num_seqs=64)
CHUNKED = replace(ROOMY, max_num_batched_tokens=23, max_num_seqs=7, prefix_caching=False)
FOUND = replace(ROOMY, max_num_seqs=5, max_num_batched_tokens=61)
# Blocks for 240 tokens and ten sequences of up to 120 tokens.
PREEMPTED = replace(ROOMY, num_kv_blocks=60, max_num_seqs=10, prefix_caching=False)

Rows = dict[tuple[str, int], torch.Tensor]
"""The logits of each output token, by request and number."""
Requests = dict[str, tuple[list[int], SamplingParams]]


class Recorder:
    """A sampler that keeps the rows it sees."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self.rows: Rows = {}

    def sample(self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        for row, item in zip(logits, (item for item in items if item.samples), strict=True):
            self.rows[item.sequence.request_id, item.sequence.num_output_tokens] = row.clone()
        return self._sampler.sample(logits, items)

    def prompt_logprobs(
        self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        return self._sampler.prompt_logprobs(logits, items)


@dataclass(frozen=True)
class Seen:
    rows: Rows
    num_preempted: int
    num_found: int


@cache
def prepared(arch: str, dtype: torch.dtype) -> tuple[PreTrainedModel, tuple[int, ...]]:
    install()
    model = make_model(arch, dtype=dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    use_whole_rows(model)
    return model, row_counts(model)


def row_counts(model: PreTrainedModel) -> tuple[int, ...]:
    return agreeing_row_counts(
        model, record_layers(model), DeterministicAttention, max_model_len=160, max_num_batched_tokens=512
    )


def serve(arch: str, dtype: torch.dtype, config: EngineConfig, requests: Requests) -> Seen:
    """Run all requests at once; the pool starts full of NaN."""
    model, sizes = prepared(arch, dtype)
    shape = cpu_shape(record_layers(model), config.num_kv_blocks + 1, config.block_size, dtype)
    backend = DeterministicAttention(shape)
    for pool in (*backend.pool.keys, *backend.pool.values):
        pool[1:] = torch.nan
    inputs = InputBuilder(config.max_num_seqs, config.max_model_len, config.block_size)
    recorder = Recorder()
    num_preempted, num_found = run(
        config, DeterministicRunner(model, backend, inputs, sizes), recorder, requests
    )
    return Seen(recorder.rows, num_preempted, num_found)


def run(config: EngineConfig, runner: Runner, sampler: Recorder, requests: Requests) -> tuple[int, int]:
    """Returns the number of preemptions and of tokens found in the prefix cache."""
    engine = Engine(config, runner, sampler, NumberText(), eos_token_ids=frozenset(), vocab_size=VOCAB_SIZE)
    for arrival, (name, (prompt, params)) in enumerate(requests.items()):
        engine.add(EngineRequest(name, prompt, params, arrival_time=arrival))
    num_preempted = num_found = 0
    while engine.has_work:
        step = engine.step()
        assert not [output.error for output in step.outputs if output.error is not None]
        num_preempted += step.report.num_preempted
        num_found += step.report.num_prefix_hit_tokens
    return num_preempted, num_found


def make_requests(count: int, max_tokens: int) -> Requests:
    """Prompts of 1 to about 100 tokens, most with a common prefix; half of them sampled at random."""
    lengths = tuple(1 + index * 37 % 97 for index in range(count))
    (beginning,) = make_prompts((40,), seed=3).values()
    prompts = [beginning + one if len(one) % 3 else one for one in make_prompts(lengths).values()]
    return {
        f"{index}": (
            prompt[:104],
            SamplingParams(temperature=float(index % 2), seed=index, max_tokens=max_tokens),
        )
        for index, prompt in enumerate(prompts)
    }


def assert_same_bits(found: Rows, expected: Rows) -> None:
    assert found.keys() == expected.keys()
    integers = torch.int32 if next(iter(expected.values())).dtype == torch.float32 else torch.int16
    different = [
        key for key, row in expected.items() if not torch.equal(row.view(integers), found[key].view(integers))
    ]
    assert different == []


def check(arch: str, dtype: torch.dtype, requests: Requests) -> None:
    alone = serve(arch, dtype, ALONE, requests)
    assert len({int(row.argmax()) for row in alone.rows.values()}) >= 8
    for config in (ROOMY, CHUNKED, FOUND, PREEMPTED):
        crowd = serve(arch, dtype, config, requests)
        assert_same_bits(crowd.rows, alone.rows)
        assert (crowd.num_found > 0) == config.prefix_caching
        assert (crowd.num_preempted > 0) == (config is PREEMPTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_64_requests_alone_batched_chunked_found_and_preempted(dtype: torch.dtype) -> None:
    """vllm#2008, vllm#11658, vllm#15437: the batch changed the greedy tokens of a request."""
    check("llama", dtype, make_requests(64, max_tokens=16))


@pytest.mark.parametrize("arch", ["gemma2", "gpt_oss", "qwen3", "mistral", "mixtral", "gpt2"])
def test_other_kinds_of_attention_and_experts(arch: str) -> None:
    """Windows, soft caps, sinks, normed queries, experts, and layers that are not `nn.Linear`."""
    check(arch, torch.float32, make_requests(12, max_tokens=8))


def test_the_rows_can_differ() -> None:
    """Without fixed sizes, some bits differ."""
    install()
    requests = make_requests(12, max_tokens=5)
    model = make_model("llama")

    def plain(config: EngineConfig) -> Rows:
        recorder = Recorder()
        engine = Engine(
            config,
            make_runner(model, config),
            recorder,
            NumberText(),
            eos_token_ids=frozenset(),
            vocab_size=VOCAB_SIZE,
        )
        for arrival, (name, (prompt, params)) in enumerate(requests.items()):
            engine.add(EngineRequest(name, prompt, params, arrival_time=arrival))
        while engine.has_work:
            engine.step()
        return recorder.rows

    with pytest.raises(AssertionError):
        assert_same_bits(plain(CHUNKED), plain(ALONE))


def hooked(change: Callable[[torch.Tensor], torch.Tensor]) -> PreTrainedModel:
    """A model whose first MLP changes its output [1, rows, size]."""
    install()
    model = make_model("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: change(output))
    return model


def test_a_model_whose_rows_mix_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'llama' cannot be served with deterministic on.*float32"):
        row_counts(hooked(lambda output: output + 1e-6 * output.mean(1, keepdim=True)))


@pytest.mark.parametrize("index", [0, 5, 15])
def test_a_model_whose_rows_depend_on_their_positions_is_refused(index: int) -> None:
    def shift(output: torch.Tensor) -> torch.Tensor:
        output[:, index : index + 1] *= 1.000001
        return output

    with pytest.raises(UnsupportedModel, match="depend on the rest of the batch"):
        row_counts(hooked(shift))


def test_a_size_that_gives_other_bits_is_not_used() -> None:
    def shift(output: torch.Tensor) -> torch.Tensor:
        return output * 1.000001 if output.shape[1] == 32 else output

    sizes = row_counts(hooked(shift))
    assert 32 not in sizes
    assert {16, 64} <= set(sizes)


class LinearsInFloat32(TorchDispatchMode):
    """Linear layers accumulate in float32, row by row; `backwards`: a single row in reverse order."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self._backwards = backwards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.linear.default:
            return func(*args, **(kwargs or {}))
        rows, weight = args[0].float().flatten(0, -2), args[1].float()
        terms = rows[:, None, :] * weight
        if self._backwards and len(rows) == 1:
            terms = terms.flip(-1)
        # Not cumsum, which accumulates in float64.
        total = sum(terms.unbind(-1), torch.zeros(()))
        return total.view(*args[0].shape[:-1], len(weight)).to(args[0].dtype)


@pytest.mark.parametrize("backwards", [False, True])
def test_an_order_of_additions_that_rounding_hides_is_found(backwards: bool) -> None:
    """On AVX-512 processors, oneDNN adds one or two rows in bfloat16 in another order than many."""
    install()
    model = make_model("llama", dtype=torch.bfloat16)
    model.set_attn_implementation(ATTENTION_NAME)
    with LinearsInFloat32(backwards):
        found = row_counts(model)
    assert (1 in found) is not backwards
    assert 2 in found


def test_a_step_is_split_into_forward_passes_of_known_sizes() -> None:
    first = in_slot(0, list(range(1, 60)), list(range(1, 20)))
    second = in_slot(1, [1, 2, 3], [20])
    decision = SchedulerOutputs(
        decode=(part(second, 2, 3, samples=True),),
        prefill=(part(first, 0, 59, logits_from=50, samples=True),),
        released_slots=(4,),
    )
    forwards = list(split(decision, (4, 8, 16)))
    cut = [
        [
            (item.sequence, item.start, item.num_new_tokens, item.logits_from, item.samples)
            for item in forward.prefill
        ]
        for forward in forwards
    ]
    assert cut == [
        [(second, 2, 1, 0, True), (first, 0, 15, 15, False)],
        [(first, 15, 16, 16, False)],
        [(first, 31, 16, 16, False)],
        [(first, 47, 12, 3, True)],
    ]
    assert [one.released_slots for one in forwards] == [(4,), (), (), ()]


def test_sizes_waste_little() -> None:
    sizes = (4, 8, 16, 32, 64, 128)
    assert [next_size(rows, sizes) for rows in (1, 4, 5, 17, 33, 43, 64, 65, 100, 129, 500)] == [
        4, 4, 8, 32, 32, 64, 64, 64, 128, 128, 128,
    ]  # fmt: skip
    assert next_size(3, (16,)) == 16
    assert next_size(40, (16,)) == 16


def test_a_forward_pass_is_padded_with_unused_rows() -> None:
    inputs = InputBuilder(2, 64, 4).build(
        SchedulerOutputs(prefill=(part(in_slot(0, [7, 8, 9], [1]), 0, 3, logits_from=1),))
    )
    padded = pad_inputs(inputs, (4, 8))
    assert padded.token_ids.tolist() == [7, 8, 9, 0]
    assert padded.batch is inputs.batch
    # If the padded logits are as many as the rows, all rows in order, which some models always compute.
    assert padded.logits_rows.tolist() == [0, 1, 2, 3]
    assert pad_inputs(inputs, (2, 8)).logits_rows.tolist() == [1, 2]


def test_a_deterministic_execution_is_built(tiny_llama: Path) -> None:
    lines: list[str] = []
    execution = build_execution(
        str(tiny_llama), device="cpu", deterministic=True, num_kv_blocks=8, progress=lines.append
    )
    assert isinstance(execution.runner, DeterministicRunner)
    assert any("rows give the same bits" in line for line in lines)
