"""A trial of the paged path against transformers' eager attention, on a small random model of the same kind.

Law: what does not agree here is not served. The trial keeps the real model's heads and sizes of heads, every
kind of layer that it has, and all that its config says about positions; it makes the vocabulary, the MLPs,
the experts, the window and the soft cap small, so that leaving one of them out shows within a few tokens.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import ATTENTION_NAME, BackendFactory, PoolShape
from engine.execution.attention.probe import record_layers
from engine.execution.runner.inputs import InputBuilder
from engine.execution.runner.model_runner import ModelRunner
from engine.outputs import ScheduledSequence, SchedulerOutputs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 16
VOCAB_SIZE = 128
DTYPE = torch.float32
LARGEST_DIFFERENCE = 5e-4
"""Of logits, as a share of the largest. Sound paths differ by 1e-5 in float32."""

# Longer than the window and than a chunk; beside it one that decodes while the long one is still read.
LONG, SHORT = 44, 9
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 16), (1, 0, 7)),
    ((1, 7, 8), (0, 16, 32)),
    ((1, 8, 9), (0, 32, 43)),
    ((0, 43, 44),),
)
"""(sequence, start, end) of what each step computes."""

MOST: dict[str, float] = {
    "vocab_size": VOCAB_SIZE,
    "sliding_window": 8,
    "attn_logit_softcapping": 2.0,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Fields of configs and the most that the trial's model has of each."""

Preparation = Callable[[PreTrainedModel], None]
"""What is done to a model before it is served."""


def check_agreement(
    config: PretrainedConfig,
    make_backend: BackendFactory,
    device: torch.device,
    prepare: Preparation = lambda _: None,
) -> None:
    """Raise `UnsupportedModel`, which names the model type and the reason, unless both ways agree.

    `prepare` is done to the model only once its own way has been computed.
    """
    name = f"model type {config.model_type!r}"
    try:
        difference = _difference(config, make_backend, device, prepare)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except Exception as error:
        # A model that cannot take part, for whatever reason, cannot be vouched for.
        raise UnsupportedModel(f"{name}: the trial failed: {type(error).__name__}: {error}") from error
    # NaN is not within the bound either.
    if not difference <= LARGEST_DIFFERENCE:
        raise UnsupportedModel(
            f"{name}: paged attention disagrees with the model's own by {difference:.2g} of the largest"
            " logit, so it must attend in a way that is not supported"
        )


def _difference(
    config: PretrainedConfig,
    make_backend: BackendFactory,
    device: torch.device,
    prepare: Preparation,
) -> float:
    small = shrink(config)
    model = _small_model(small, device)
    token_ids = 1 + torch.arange(LONG + SHORT) * 37 % (small.get_text_config().vocab_size - 1)
    texts = (token_ids[:LONG].tolist(), token_ids[LONG:].tolist())
    sequences = [_sequence(slot, text) for slot, text in enumerate(texts)]
    with torch.inference_mode():
        expected = [
            model(input_ids=torch.tensor([one.token_ids], device=device), use_cache=False).logits[0]
            for one in sequences
        ]
    model.set_attn_implementation(ATTENTION_NAME)
    prepare(model)
    backend = make_backend(PoolShape(record_layers(model), NUM_BLOCKS, BLOCK_SIZE, DTYPE, device))
    found = _run(ModelRunner(model, backend, InputBuilder(2, LONG, BLOCK_SIZE)), sequences)
    return max(
        float((ours.float() - theirs.float()).abs().max() / theirs.abs().max())
        for ours, theirs in zip(found, expected, strict=True)
    )


def _run(runner: ModelRunner, sequences: list[Sequence]) -> list[torch.Tensor]:
    """The logits of every token of each sequence, computed step by step as a scheduler would have it."""
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in STEPS:
        items = tuple(ScheduledSequence(sequences[who], at, end - at, 0, False) for who, at, end in step)
        logits = runner.execute(SchedulerOutputs(prefill=items))
        for who, at, end in step:
            rows[who].append(logits[: end - at])
            logits = logits[end - at :]
    return [torch.cat(parts) for parts in rows]


def _sequence(slot: int, token_ids: list[int]) -> Sequence:
    sequence = Sequence(f"trial-{slot}", token_ids, SamplingParams(), arrival_time=0.0)
    sequence.admit(slot)
    # One counts up from the pool's start, one down from its end.
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    blocks = range(1, NUM_BLOCKS) if slot else range(NUM_BLOCKS - 1, 0, -1)
    sequence.block_table = list(blocks[:num_blocks])
    return sequence


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of `config` for a model that is small but attends as the real one does."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    _keep_kinds_of_layers(text)
    for field, most in MOST.items():
        value = getattr(text, field, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > most:
            setattr(text, field, most)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for part in (text, small):
            if getattr(part, field, None) is not None:
                # It may lie outside the small vocabulary.
                setattr(part, field, 0)
    return small


def _keep_kinds_of_layers(text: PretrainedConfig) -> None:
    """One layer for each kind, at least two. Fields with one entry a layer say which kinds there are."""
    num_layers = text.num_hidden_layers
    by_layer = {
        field: value
        for field, value in vars(text).items()
        if isinstance(value, (list, tuple)) and len(value) == num_layers
    }
    kinds: dict[str, int] = {}
    for layer in range(num_layers):
        kinds.setdefault(repr([value[layer] for value in by_layer.values()]), layer)
    layers = sorted({0, min(1, num_layers - 1), *kinds.values()})
    text.num_hidden_layers = len(layers)
    for field, value in by_layer.items():
        setattr(text, field, [value[layer] for layer in layers])


def _small_model(config: PretrainedConfig, device: torch.device) -> PreTrainedModel:
    """Random weights, so large that attention is far from even; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        # Typed as Any: the method has no types in transformers.
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="eager", dtype=DTYPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.add_(0.1 * noise)
            else:
                weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5)
    ready: PreTrainedModel = model.to(device).eval()
    return ready
