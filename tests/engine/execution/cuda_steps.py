"""Runs the steps of a worker on a fake CUDA device and prints the observations as JSON.

    python -m tests.engine.execution.cuda_steps

In a process of its own, without TRITON_INTERPRET: see `fake_cuda.py`.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from transformers import LlamaConfig

from engine.config import EngineConfig
from engine.constraints import Constraints
from engine.execution import plans
from engine.execution.attention.interface import Backend
from engine.execution.attention.probe import record_layers
from engine.execution.graphs.self_check import GraphSelfCheck
from engine.execution.loading.attention_backends import TORCH, triton_backend
from engine.execution.loading.loader import LoadedModel
from engine.execution.machine.memory import free_bytes
from engine.execution.runner.async_runner import DeviceExecutor
from engine.execution.runner.inputs import StepInputs
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.sampling.logprobs import token_logprobs
from engine.execution.sampling.sampler import Sampler
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.execution.fake_cuda import DEVICE, KernelVariants, Wait, WaitLedger, fake_cuda, fake_model
from tests.engine.execution.fake_cuda_memory import FakeMemory
from tests.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_config

CONFIG = EngineConfig(
    max_model_len=2048, num_kv_blocks=600, block_size=16, max_num_batched_tokens=256, max_num_seqs=4
)
EIGHT_BILLION = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=False,
)
GREEDY = {"temperature": 0.0}
FALLBACK_ARCHITECTURES = ("llama", "mistral", "gpt_oss")
"""Plain attention, a window, and explicit scores: the paths of the torch backend."""
UNTIL_READ = suppress(DataDependentOutputException, DynamicOutputShapeException)
"""Fake tensors have no values to read."""
Parts = list[tuple[int, int, int]]
"""(sequence, start, end)."""

LAUNCHED: dict[str, tuple[Parts, list[dict[str, Any]]]] = {
    "a prompt": ([(0, 0, 32)], [GREEDY]),
    "a prompt and a decode": ([(0, 0, 33), (1, 8, 9)], [GREEDY]),
    "a chunk after others, decodes": ([(0, 40, 61), (1, 8, 9), (2, 700, 701)], [GREEDY]),
    "two prompts": ([(0, 0, 9), (1, 0, 30)], [GREEDY, {"seed": 3}]),
    "greedy decodes": ([(0, 19, 20), (1, 8, 9), (2, 700, 701)], [GREEDY]),
    "random decodes": ([(0, 19, 20), (1, 8, 9)], [{"seed": 1}, {"seed": 2, "min_p": 0.1}]),
    "one decode": ([(0, 4, 5)], [{"seed": 1, "temperature": 0.5}]),
}
"""Steps that are launched asynchronously: parts, and alternating sampling parameters."""

MODEL_STEPS = ("a chunk after others, decodes", "greedy decodes")
"""Steps of `LAUNCHED` in which models differ."""
VARIANT_ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt_oss")
"""Plain attention, heads of an odd size, windows and soft caps, windows and sinks."""

SERVED: dict[str, Parts] = {
    "first prompt": [(0, 0, 100)],
    "a prompt of one token": [(0, 0, 1)],
    "a prompt of two tokens": [(0, 0, 2)],
    "a whole step": [(0, 0, 256)],
    "a chunk after others": [(0, 512, 700)],
    "a chunk after others, decodes": [(0, 512, 700), (1, 40, 41), (2, 99, 100)],
    "a prompt, decodes with long tables": [(0, 0, 17), (1, 1900, 1901), (2, 99, 100)],
    "an odd number of rows": [(0, 0, 17), (1, 0, 13)],
    "one decode": [(0, 20, 21)],
    "one long decode": [(0, 2000, 2001)],
    "many decodes": [(who, 30 + who, 31 + who) for who in range(4)],
    "odd blocks": [(who, 100 * who + 1, 100 * who + 2) for who in range(3)],
}
"""Steps that a ready worker may run."""


class FakeCapture:
    """Replaces `CudaCapture`: runs the work; a replay launches nothing."""

    def __init__(self, _: torch.device) -> None:
        """No stream is needed."""

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        return reversed(sizes)

    waits: ClassVar[list[Wait]] = []
    """Waits in all captures, which CUDA would refuse."""

    def __call__(self, work: Callable[[], None]) -> "FakeCapture":
        with WaitLedger() as ledger:
            work()
        self.waits.extend(ledger.waits)
        return self

    def replay(self) -> None:
        """Launches nothing."""


def patch_captures() -> None:
    """Capture decode steps as on a GPU, without comparing logits, which fake tensors do not have."""

    def check(self: GraphSelfCheck, replay: Callable[[StepInputs], torch.Tensor], size: int) -> None:
        replay(self._inputs(max(1, size - 1)))

    GraphSelfCheck.check = check  # type: ignore[method-assign]
    setattr(plans, "CudaCapture", FakeCapture)  # noqa: B010  # not exported
    torch.cuda.mem_get_info = lambda *_: (1 << 34, 1 << 35)


def make_runner(arch: str, backend: Backend, *, has_graphs: bool) -> ModelRunner:
    """A runner as a worker makes it."""
    model = fake_model(make_config(arch))
    plan = plans.plain((backend,), None, has_graphs=has_graphs)
    plan.prepare(model)
    loaded = LoadedModel(
        model=model,
        layers=record_layers(model),
        backend=backend,
        directory=Path(),
        device=DEVICE,
        dtype=model.dtype,
        max_model_len=CONFIG.max_model_len,
        eos_token_ids=frozenset(),
        vocab_size=VOCAB_SIZE,
        fingerprint="",
    )
    runner = plan.make_runner(loaded, CONFIG, lambda _: None)
    assert isinstance(runner, ModelRunner)
    assert bool(runner.graph_sizes) == (has_graphs and backend is not TORCH)
    return runner


def step_of(
    parts: Parts, params: list[dict[str, Any]], constraints: Constraints | None = None
) -> SchedulerOutputs:
    items = []
    for at, (who, start, end) in enumerate(parts):
        given = SamplingParams(max_tokens=50, **params[at % len(params)])
        sequence = Sequence(f"{who}", [1 + who] * (end - 1) or [1], given, arrival_time=0.0)
        if constraints is not None:
            sequence.constraints = constraints
        if end - start == 1 and start:
            sequence.append(7)
        else:
            sequence.token_ids = [1 + who] * end
            sequence.num_prompt_tokens = end
        sequence.admit(who)
        num_blocks = -(-end // CONFIG.block_size)
        sequence.block_table = [
            1 + (131 * who + 3 * block) % CONFIG.num_kv_blocks for block in range(num_blocks)
        ]
        items.append(ScheduledSequence(sequence, start, end - start, end - start - 1, True))
    return SchedulerOutputs(prefill=tuple(items))


def launched_waits(runner: ModelRunner, steps: Iterable[str]) -> dict[str, list[Wait]]:
    """The waits of each of `steps`, alone and after a step whose tokens are not known yet."""
    async_executor = DeviceExecutor(runner, Sampler(), DEVICE)
    found = {}
    for name in steps:
        parts, params = LAUNCHED[name]
        outputs = step_of(parts, params)
        assert all(map(async_executor.can_launch, outputs.scheduled))
        with WaitLedger() as ledger:
            before = async_executor.launch(outputs, None)
        found[name] = ledger.waits
        for place, item in enumerate(outputs.scheduled):
            item.sequence.token_ids[-1] = -1 - place
        with WaitLedger() as ledger:
            after = async_executor.launch(outputs, before)
        assert after.tokens.device == DEVICE
        found[f"{name}, after another step"] = ledger.waits
    return found


class AnyText:
    """A grammar that allows even token ids."""

    is_complete = False

    def advance(self, token_ids: list[int]) -> None:
        """Any text is allowed."""

    def fill_bitmask(self, row: Any) -> None:
        row[:] = 0x55555555


GRAMMAR = Constraints(grammar=AnyText())
SAMPLED: dict[str, tuple[dict[str, Any], Constraints]] = {
    "grammar": (GREEDY, GRAMMAR),
    "grammar, random": ({"seed": 1}, GRAMMAR),
    "grammar, too short": ({"min_tokens": 30}, Constraints(grammar=AnyText(), end_token_ids=frozenset({2}))),
    "allowed tokens": ({"allowed_token_ids": [3, 5, 8]}, Constraints()),
    "bad words": (GREEDY, Constraints(bad_token_ids=((9,), (7, 11)))),
    "too short": ({"min_tokens": 30}, Constraints(end_token_ids=frozenset({2}))),
    "penalties": ({"repetition_penalty": 1.2, "presence_penalty": 0.5}, Constraints()),
    "bias": ({"logit_bias": {5: 3.0}}, Constraints()),
    "all": (
        {"repetition_penalty": 1.2, "logit_bias": {5: 3.0}, "min_tokens": 30, "seed": 2},
        Constraints(grammar=AnyText(), bad_token_ids=((9,), (7, 11)), end_token_ids=frozenset({2})),
    ),
    "logprobs": ({"logprobs": 3}, Constraints()),
    "top_p": ({"seed": 1, "top_p": 0.9}, Constraints()),
}
"""Steps that are not launched asynchronously."""


def sampled_waits(runner: ModelRunner) -> dict[str, list[Wait]]:
    """The waits of each of `SAMPLED`, up to the first result that the host must know."""
    found = {}
    for name, (params, constraints) in SAMPLED.items():
        parts: Parts = [(0, 19, 20), (1, 8, 9), (2, 0, 33), (3, 40, 41)]
        outputs = step_of(parts, [params, GREEDY], constraints)
        for item in outputs.scheduled[1::2]:
            item.sequence.constraints = Constraints()
        with WaitLedger() as ledger:
            logits = runner.execute(outputs)
            with UNTIL_READ:
                Sampler().sample(logits, outputs.scheduled)
        found[name] = ledger.waits
    with WaitLedger() as ledger, UNTIL_READ:
        token_logprobs(logits, [3, 5, 7, 9], [2, 0, 1, 0])
    found["logprobs of known tokens"] = ledger.waits
    return found


def zeroed_waits(runner: ModelRunner) -> list[Wait]:
    """The waits of a step that zeroes blocks first."""
    parts, params = LAUNCHED["a prompt and a decode"]
    outputs = step_of(parts, params)
    with WaitLedger() as ledger:
        runner.execute(SchedulerOutputs(prefill=outputs.prefill, blocks_to_zero=(3, 4)))
    waits: list[Wait] = ledger.waits
    return waits


def planted_waits() -> dict[str, list[str]]:
    """The ledger's entries for operations that wait and for some that do not."""
    there = torch.empty(4, device=DEVICE)

    def pinned() -> torch.Tensor:
        return torch.empty(4, pin_memory=True)

    cases: dict[str, Callable[[], object]] = {
        "to": lambda: torch.empty(4).to(DEVICE),
        "tensor": lambda: torch.tensor([1], device=DEVICE),
        "pageable": lambda: torch.empty(4).to(DEVICE, non_blocking=True),
        "cpu": lambda: there.cpu(),
        "tolist": lambda: there.tolist(),
        "item": lambda: there[0].item(),
        "bool": lambda: bool(there[0] > 0),
        "nonzero": lambda: there.nonzero(),
        "repeats": lambda: there.repeat_interleave(there.long()),
        "mask": lambda: there[there > 0],
        "host index": lambda: there[torch.tensor([1, 2])],
        "host value": lambda: there.index_put_((there.long(),), torch.tensor(1.0)),
        "fetch": lambda: torch.empty(4).copy_(there, non_blocking=True),
        "right": lambda: pinned().to(DEVICE, non_blocking=True),
        "right index": lambda: there[there.long()],
        "right fetch": lambda: pinned().copy_(there, non_blocking=True),
        "right fill": lambda: there.masked_fill_(there > 0, 1.0),
    }
    found = {}
    for name, case in cases.items():
        with WaitLedger() as ledger, UNTIL_READ:
            case()
        found[name] = [wait.what for wait in ledger.waits]
    return found


def variants_by_time(arch: str, backend: Backend, *, has_graphs: bool) -> dict[str, Any]:
    """The kernel variants that are compiled while the model loads, and those that later steps add."""
    with KernelVariants().installed() as kernels:
        runner = make_runner(arch, backend, has_graphs=has_graphs)
        runner.check()
        loading = list(kernels.variants)
        serving = {}
        for name, parts in SERVED.items():
            known = len(kernels.variants)
            runner.execute(step_of(parts, [GREEDY]))
            if new := kernels.variants[known:]:
                serving[name] = new
    return {"loading": loading, "serving": serving, "launches": kernels.launches}


def fused_memory(*, hold_originals: bool) -> dict[str, Any]:
    """Memory of a Llama of 8 billion weights in bfloat16 that is prepared on a GPU of 22 GiB, in bytes.

    `hold_originals`: something else keeps the weights that were fused alive.
    """
    memory = FakeMemory(22 << 30)
    torch.cuda.mem_get_info = memory.mem_get_info  # type: ignore[assignment]
    torch.cuda.empty_cache = memory.empty_cache
    with memory:
        model = fake_model(EIGHT_BILLION)
        weights = sum(weight.nbytes for weight in model.parameters())
        held = list(model.parameters()) if hold_originals else []
        error = None
        try:
            plans.plain((TORCH,), None).prepare(model)
        except torch.OutOfMemoryError as caught:
            error = repr(caught)
        free = free_bytes(DEVICE)
        held.clear()
    return {"weights": weights, "total": memory.total, "peak": memory.peak, "free": free, "error": error}


def report() -> dict[str, Any]:
    triton = triton_backend()
    found: dict[str, Any] = {"planted": planted_waits(), "launched": {}, "captured": {}, "variants": {}}
    for arch in ARCHITECTURES:
        with KernelVariants().installed():
            FakeCapture.waits.clear()
            graphed = make_runner(arch, triton, has_graphs=True)
            found["captured"][arch] = list(FakeCapture.waits)
            found["launched"][arch] = launched_waits(graphed, MODEL_STEPS)
    with KernelVariants().installed():
        for has_graphs in (True, False):
            runner = make_runner("llama", triton, has_graphs=has_graphs)
            found["launched"][f"llama, all steps, graphs {has_graphs}"] = launched_waits(runner, LAUNCHED)
        found["launched"]["llama, blocks zeroed"] = {"a step": zeroed_waits(runner)}
        found["sampled"] = sampled_waits(runner)
    for arch in FALLBACK_ARCHITECTURES:
        runner = make_runner(arch, TORCH, has_graphs=False)
        found["launched"][f"{arch}, torch attention"] = launched_waits(runner, LAUNCHED)
    for arch in VARIANT_ARCHITECTURES:
        for has_graphs in (True, False):
            name = f"{arch}, graphs {has_graphs}"
            found["variants"][name] = variants_by_time(arch, triton, has_graphs=has_graphs)
    warm_up, ModelRunner.warm_up = ModelRunner.warm_up, lambda *_: None  # type: ignore[method-assign]
    found["variants without warm-up"] = variants_by_time("llama", triton, has_graphs=False)
    ModelRunner.warm_up = warm_up  # type: ignore[method-assign]
    found["memory"] = fused_memory(hold_originals=False)
    found["memory, originals held"] = fused_memory(hold_originals=True)
    return found


if __name__ == "__main__":
    with fake_cuda():
        patch_captures()
        # Imported objects are excluded from garbage collection, which would visit them repeatedly.
        gc.freeze()
        json.dump(report(), sys.stdout)
