"""Serves prompts with the real engine on a model in memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.attention.interface import ATTENTION_NAME, AttentionBackend, PoolShape, install
from engine.execution.attention.probe import record_layers
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.sampling.sampler import Sampler
from engine.outputs import ScheduledSequence
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from tests.engine.execution.pools import poisoned
from tests.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@dataclass(frozen=True)
class Served:
    """Tokens and errors by request, and the numbers of preemptions and of prefix cache hits in tokens."""

    token_ids: dict[str, list[int]]
    errors: dict[str, str]
    num_preempted: int
    num_found: int


class NumberText:
    """A tokenizer that decodes token ids to numbers."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, token_ids))

    def decoded_bytes(self, skip_special_tokens: bool = True) -> None:
        """Tokens have no bytes of their own."""

    def encode_text(self, text: str) -> list[int]:
        raise NotImplementedError

    def special_token_id(self, text: str) -> int | None:
        raise NotImplementedError


def make_runner(
    model: PreTrainedModel,
    config: EngineConfig,
    wrap: Callable[[AttentionBackend], AttentionBackend] = lambda backend: backend,
    attention: str = "native",
) -> ModelRunner:
    """A runner for `model`. The pool starts full of NaN."""
    install()
    model.set_attn_implementation(ATTENTION_NAME)
    layers, num_blocks = record_layers(model), config.num_kv_blocks + 1
    backend = poisoned(attention, PoolShape(layers, num_blocks, config.block_size, model.dtype, model.device))
    inputs = InputBuilder(config.max_num_seqs, config.max_model_len, config.block_size)
    return ModelRunner(model, wrap(backend), inputs)


def serve(
    runner: ModelRunner,
    config: EngineConfig,
    requests: dict[str, tuple[list[int], SamplingParams]],
) -> Served:
    """Run all requests concurrently until they finish."""
    engine = Engine(config, runner, Sampler(), NumberText(), eos_token_ids=frozenset(), vocab_size=VOCAB_SIZE)
    for arrival, (name, (prompt, params)) in enumerate(requests.items()):
        engine.add(EngineRequest(name, prompt, params, arrival_time=arrival))
    token_ids: dict[str, list[int]] = {name: [] for name in requests}
    errors: dict[str, str] = {}
    num_preempted = num_found = 0
    while engine.has_work:
        step = engine.step()
        num_preempted += step.report.num_preempted
        num_found += step.report.num_prefix_hit_tokens
        for output in step.outputs:
            if output.token_id is not None:
                token_ids[output.request_id].append(output.token_id)
            if output.error is not None:
                errors[output.request_id] = output.error
    return Served(token_ids, errors, num_preempted, num_found)


def make_prompts(lengths: tuple[int, ...], seed: int = 1) -> dict[str, list[int]]:
    """Random prompts of the given lengths, without special tokens, named by their length."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{length} tokens": torch.randint(5, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in lengths
    }


def in_slot(
    slot: int, token_ids: list[int], block_table: list[int], params: SamplingParams = GREEDY
) -> Sequence:
    """A running sequence, as a scheduler would hand it to a runner."""
    sequence = Sequence(f"slot {slot}", token_ids, params, arrival_time=0.0)
    sequence.admit(slot)
    sequence.block_table = block_table
    return sequence


def part(
    sequence: Sequence, start: int, end: int, logits_from: int = 0, samples: bool = False
) -> ScheduledSequence:
    """Tokens `start` to `end` of a sequence, in one step."""
    return ScheduledSequence(sequence, start, end - start, logits_from, samples)
