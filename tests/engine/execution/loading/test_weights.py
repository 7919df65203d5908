"""Weights that do not match the config are refused; transformers would fill gaps with random values."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from engine.errors import InvalidParameter
from engine.execution.attention.interface import install
from engine.execution.loading.weights import load_weights
from engine.execution.machine.library_messages import quiet_transformers
from tests.engine.checkpoint.broken_checkpoints import Fault, Tensors, config, pickled, sharded, tensors
from tests.tiny_models import save_model


def load(directory: Path) -> PreTrainedModel:
    install()
    with quiet_transformers():
        return load_weights(directory, torch.float32, torch.device("cpu"))


def renamed(old: str, new: str) -> Fault:
    return tensors(lambda found: {name.replace(old, new): one for name, one in found.items()})


def without(part: str) -> Fault:
    return tensors(lambda found: {name: one for name, one in found.items() if part not in name})


def with_another_layer(found: Tensors) -> Tensors:
    return {**found, **{name.replace(".1.", ".2."): one.clone() for name, one in found.items()}}


def prefixed(found: Tensors) -> Tensors:
    return {f"base_model.{name}": one for name, one in found.items()}


def shortened(found: Tensors) -> Tensors:
    return {**found, "lm_head.weight": found["lm_head.weight"][:300].clone()}


def with_bias(found: Tensors) -> Tensors:
    return {**found, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            tensors(prefixed),
            r"21 tensors are missing: lm_head.weight, model.embed_tokens.weight, .* and 18 more; 21 tensors"
            r" are not part of the model: base_model.lm_head.weight, .* and 18 more",
        ),
        (without("layers.0.mlp.up_proj"), r"1 tensors are missing: model.layers.0.mlp.up_proj.weight$"),
        (
            without("layers.1."),
            r"9 tensors are missing: model.layers.1.input_layernorm.weight, .* and 6 more",
        ),
        (without("lm_head"), r"1 tensors are missing: lm_head.weight$"),
        (tensors(shortened), r"another shape: lm_head.weight \(\[300, 64\] instead of \[320, 64\]\)"),
        (config(vocab_size=400), r"2 tensors have another shape: lm_head.weight \(\[320, 64\] instead of"),
        (config(num_hidden_layers=1), r"9 tensors are not part of the model: model.layers.1.input_layernorm"),
        (tensors(with_another_layer), r"not part of the model: model.layers.2.input_layernorm.weight"),
        (tensors(with_bias), r"not part of the model: model.layers.0.self_attn.q_proj.bias$"),
    ],
)
def test_weights_that_do_not_fit(tiny_llama: Path, tmp_path: Path, fault: Fault, message: str) -> None:
    """vllm#15536, vllm#11802, colibri#1476: a checkpoint without its weights was served as ready."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    fault(model)
    with pytest.raises(InvalidParameter, match=message) as raised:
        load(model)
    assert "do not fit model type 'llama' as config.json describes it" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_misshapen_experts(tmp_path: Path) -> None:
    """transformers joins experts while loading, and reports those that it cannot join separately."""
    model = save_model(tmp_path / "mixtral", "mixtral")
    without("layers.0.block_sparse_moe.experts.1.w1")(model)
    with pytest.raises(InvalidParameter, match=r"the weights in .* cannot be loaded: ") as raised:
        load(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: None,
        sharded,
        pickled,
        # Checkpoints of the bare model, without the prefix, are common.
        renamed("model.", ""),
        # Not parts of the model: a vision tower, and a buffer that older versions saved.
        tensors(lambda found: {**found, "vision_tower.proj.weight": torch.zeros(2)}),
        tensors(lambda found: {**found, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}),
    ],
)
def test_weights_that_fit(tiny_llama: Path, tmp_path: Path, change: Fault) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    wanted = load_file(model / "model.safetensors")
    change(model)
    loaded = load(model).state_dict()
    assert all(torch.equal(loaded[name], one) for name, one in wanted.items())


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma2"])
def test_tied_weights_are_not_missing(tmp_path: Path, arch: str) -> None:
    model = save_model(tmp_path / arch, arch, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(model / "model.safetensors")
    loaded = load(model)
    head, embeddings = loaded.get_output_embeddings(), loaded.get_input_embeddings()
    assert head is not None
    assert head.weight is embeddings.weight


def test_tied_weights_that_are_both_missing(tmp_path: Path) -> None:
    model = save_model(tmp_path / "tied", tie_word_embeddings=True)
    without("embed_tokens")(model)
    with pytest.raises(
        InvalidParameter, match=r"tensors are missing: lm_head.weight, model.embed_tokens.weight"
    ):
        load(model)
