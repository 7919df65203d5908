"""Observes how a model attends in a forward pass, and refuses models whose attention is not supported.

Whether the attention is computed correctly is checked by `loading/agreement.py`.
"""

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import LayerCall, LayerSpec


def refuse_by_config(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModel` for models that their class or config excludes, before weights are loaded."""
    model_type = config.model_type
    text = config.get_text_config()
    # Maps config classes to model classes; untyped in transformers.
    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping or config.is_encoder_decoder:
        raise UnsupportedModel(f"model type {model_type!r} is not a decoder-only language model")
    if not mapping[type(config)]._supports_attention_backend:
        raise UnsupportedModel(
            f"model type {model_type!r} does not use the attention interface of transformers"
            " (_supports_attention_backend is false), so its attention cannot be served"
        )
    if not getattr(text, "num_hidden_layers", None):
        raise UnsupportedModel(f"model type {model_type!r}: its config states no layers (num_hidden_layers)")
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        raise UnsupportedModel(f"model type {model_type!r} has chunked attention, which is not supported")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModel(f"model type {model_type!r} has bidirectional attention")


def record_layers(model: PreTrainedModel) -> tuple[LayerSpec, ...]:
    """The attention layers of a model, observed in a forward pass of two tokens.

    Raises `UnsupportedModel` unless every layer calls the attention function exactly once.
    """
    calls = pass_of_two_tokens(model)
    num_layers = model.config.get_text_config().num_hidden_layers
    layers = [call.layer for call in calls]
    if sorted(layers) != list(range(num_layers)):
        raise UnsupportedModel(
            f"model type {model.config.model_type!r} has {num_layers} layers but called the attention"
            f" function {len(layers)} times, for {len(set(layers))} layers: each must call it once"
        )
    return tuple(call.spec for call in sorted(calls, key=lambda call: call.layer))


class SeenCall(NamedTuple):
    """A call of the attention function. `query`, `key`: [tokens, heads, size]."""

    layer: int
    spec: LayerSpec
    query: torch.Tensor
    key: torch.Tensor


def pass_of_two_tokens(model: PreTrainedModel) -> list[SeenCall]:
    """Run a forward pass in which attention returns zeros. Returns the calls of the attention function."""
    recorder = _Recorder()
    tokens = torch.arange(2, device=model.device)[None]
    with torch.inference_mode():
        # Without logits, so that the largest weight is not read.
        model(
            input_ids=tokens,
            position_ids=tokens,
            use_cache=False,
            logits_to_keep=tokens[0, :0],
            attention_metadata=recorder,
        )
    return recorder.calls


class _Recorder:
    """Attention metadata that records the calls and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[SeenCall] = []

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        spec = LayerSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            value_dim=value.shape[2],
            scaling=call.scaling,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            sinks=call.sinks is not None,
        )
        self.calls.append(SeenCall(call.layer, spec, query, key))
        return query.new_zeros(*query.shape[:2], value.shape[2])
