"""Self-check of the paged path against transformers' eager attention, on a small random model.

A model that fails it is not served. The small model keeps the heads, the head sizes, every kind of layer and
the positions of the real one. Its vocabulary, MLPs, experts, window and soft cap are small, so that omitting
one shows within a few tokens.
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
from engine.execution.runner.synthetic_steps import Part, SyntheticSequences

BLOCK_SIZE = 4
VOCAB_SIZE = 128
DTYPE = torch.float32
MAX_DIFFERENCE = 5e-4
"""Of logits, as a share of the largest. Correct paths differ by 1e-5 in float32."""

LENGTHS = (44, 9)
"""One sequence longer than the window and than a chunk, and one that decodes while the first is prefilled."""
STEPS: tuple[tuple[Part, ...], ...] = (
    ((0, 0, 16), (1, 0, 7)),
    ((1, 7, 8), (0, 16, 32)),
    ((1, 8, 9), (0, 32, 43)),
    ((0, 43, 44),),
)

MAX_SIZES: dict[str, float] = {
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
"""Fields of configs and their largest values in the small model."""

Preparation = Callable[[PreTrainedModel], None]
"""A change of a model before it is served."""


def check_agreement(
    config: PretrainedConfig,
    make_backend: BackendFactory,
    device: torch.device,
    prepare: Preparation = lambda _: None,
) -> None:
    """Raise `UnsupportedModel`, with model type and reason, unless paged and eager attention agree.

    `prepare` is applied after the eager logits are computed.
    """
    name = f"model type {config.model_type!r}"
    try:
        difference = _difference(config, make_backend, device, prepare)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except Exception as error:
        # A model whose check fails for any reason is not known to be correct.
        raise UnsupportedModel(f"{name}: the self-check failed: {type(error).__name__}: {error}") from error
    # Also true for NaN.
    if not difference <= MAX_DIFFERENCE:
        raise UnsupportedModel(
            f"{name}: paged attention disagrees with the model's own by {difference:.2g} of the largest"
            " logit, so its kind of attention is not supported"
        )


def _difference(
    config: PretrainedConfig, make_backend: BackendFactory, device: torch.device, prepare: Preparation
) -> float:
    """The largest difference of logits, as a share of the largest logit."""
    small = shrink(config)
    model = _small_model(small, device)
    sequences = SyntheticSequences(LENGTHS, BLOCK_SIZE, small.get_text_config().vocab_size)
    with torch.inference_mode():
        expected = [
            model(input_ids=torch.tensor([token_ids], device=device), use_cache=False).logits[0]
            for token_ids in sequences.token_ids
        ]
    model.set_attn_implementation(ATTENTION_NAME)
    prepare(model)
    shape = PoolShape(record_layers(model), sequences.num_blocks, BLOCK_SIZE, DTYPE, device)
    runner = ModelRunner(model, make_backend(shape), InputBuilder(len(LENGTHS), max(LENGTHS), BLOCK_SIZE))
    return max(
        float((paged.float() - eager.float()).abs().max() / eager.abs().max())
        for paged, eager in zip(_run(runner, sequences), expected, strict=True)
    )


def _run(runner: ModelRunner, sequences: SyntheticSequences) -> list[torch.Tensor]:
    """The logits of every token of each sequence, computed step by step."""
    rows: list[list[torch.Tensor]] = [[] for _ in LENGTHS]
    for parts in STEPS:
        logits = runner.execute(sequences.step(parts))
        sizes = [end - start for _, start, end in parts]
        for (index, _, _), part in zip(parts, torch.split(logits, sizes), strict=True):
            rows[index].append(part)
    return [torch.cat(parts) for parts in rows]


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of `config` for a small model with the same attention."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    _keep_kinds_of_layers(text)
    for field, limit in MAX_SIZES.items():
        value = getattr(text, field, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > limit:
            setattr(text, field, limit)
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for part in (text, small):
            if getattr(part, field, None) is not None:
                # It may lie outside the small vocabulary.
                setattr(part, field, 0)
    return small


def _keep_kinds_of_layers(text: PretrainedConfig) -> None:
    """One layer of each kind, at least two. Kinds differ in the fields with one entry per layer."""
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
    """Weights large enough for uneven attention; the global random state does not change."""
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
