"""Describes the served models and the sizes that bound their speed.

Sizes come from the config in the model's directory.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`config`: of a model of random weights, as transformers names its fields; None: tokenmill's default
    model. `num_requests`: of a workload, fewer where one pass takes a second."""

    title: str
    config: dict[str, Any] | None = None
    num_requests: int = 64


_RANDOM = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 8192}
MODELS = {
    "smollm2-135m": Model(title="SmolLM2-135M-Instruct"),
    "random-7m": Model(
        title="Llama, 6 layers of 288, 4,096 tokens, random weights",
        config={
            **_RANDOM,
            "model_type": "llama",
            "vocab_size": 4096,
            "hidden_size": 288,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
        },
    ),
    "random-0.5b": Model(
        title="Qwen2, 24 layers of 896, 151,936 tokens, random weights",
        num_requests=32,
        config={
            **_RANDOM,
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama-like model, in elements.

    `layer_weights`: all matrices that every token passes; `head_weights`: the output layer, which only rows
    that are sampled pass; `kv_elements`: keys and values of one token in all layers; `score_elements`: query
    elements of one token in all layers.
    """

    vocab_size: int
    layer_weights: int
    head_weights: int
    kv_elements: int
    score_elements: int

    @property
    def weights(self) -> int:
        return self.layer_weights + self.head_weights


def read_shape(directory: Path) -> Shape:
    return shape_of(json.loads((directory / "config.json").read_text()))


def shape_of(config: dict[str, Any]) -> Shape:
    """Of a config of Llama or Qwen2, whose MLPs have three matrices."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries = heads * head_dim
    keys = (config.get("num_key_value_heads") or heads) * head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    return Shape(
        vocab_size=config["vocab_size"],
        layer_weights=layers * (attention + 3 * hidden * config["intermediate_size"]),
        head_weights=hidden * config["vocab_size"],
        kv_elements=layers * 2 * keys,
        score_elements=layers * queries,
    )
