"""Weights in 8 and 4 bits: products, memory, and weights that stay plain."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.errors import InvalidParameter
from engine.execution.attention.interface import ATTENTION_NAME, install
from engine.execution.build import build_execution
from engine.execution.layers import quantized_linears as module
from engine.execution.layers.fused_linears import FusedPart, fuse_linears
from engine.execution.layers.quantized_linears import (
    QuantizedEmbedding,
    QuantizedLinear,
    multiply,
    product_dtype,
    quantize_linears,
)
from engine.execution.layers.quantized_weights import (
    GROUP,
    Int4Weight,
    Int8Weight,
    quantize_to_int4,
    quantize_to_int8,
)
from engine.execution.plans import check_quantization
from tests.comparer import assert_equal_tokens, reference
from tests.engine.execution.serving import GREEDY, make_prompts, make_runner, serve
from tests.tiny_models import ARCHITECTURES, make_model

CPU = torch.device("cpu")
PROMPTS = make_prompts((1, 5, 17, 33))
CROWDED = EngineConfig(
    max_model_len=128, num_kv_blocks=30, block_size=4, max_num_batched_tokens=24, max_num_seqs=4
)
WORDS = ("int8", "int4")


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MINIMUM_NUMEL", 0)


def ready(arch: str = "llama", **overrides: Any) -> PreTrainedModel:
    install()
    model = make_model(arch, **overrides)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def numbers(weight: Int8Weight | Int4Weight, num_rows: int) -> torch.Tensor:
    return weight.take(torch.arange(num_rows))


@settings(max_examples=40)
@given(
    st.integers(1, 5), st.integers(1, 4), st.floats(1e-3, 1e3), st.floats(-2.0, 2.0), st.integers(0, 1 << 30)
)
def test_elements_are_rounded_to_the_nearest_value(
    num_rows: int, num_groups: int, size: float, middle: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_rows, num_groups * GROUP, generator=generator)
    weight = (noise + middle) * size
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((numbers(quantize_to_int8(weight), num_rows) - weight).abs() <= step * 0.501).all()

    groups = weight.view(num_rows, num_groups, GROUP)
    span = groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)
    # Half a step, and the rounding of scale and offset to float16.
    maximum = span / 30 + 2**-10 * (span + groups.abs().amax(2, keepdim=True))
    found = numbers(quantize_to_int4(weight), num_rows).view(groups.shape)
    assert ((found - groups).abs() <= maximum).all()


def test_plain_weights_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model never exists twice, plain and quantized."""
    model = ready()
    originals = [weakref.ref(weight) for weight in model.parameters() if weight.ndim == 2]
    alive: list[int] = []
    quantize = module._quantize

    def counting(weight: torch.Tensor, quantization: str) -> Any:
        alive.append(sum(one() is not None for one in originals))
        return quantize(weight, quantization)

    monkeypatch.setattr(module, "_quantize", counting)
    assert quantize_linears(model, "int8").num_weights == len(originals)
    assert alive == list(range(len(originals), 0, -1))


@pytest.mark.parametrize("quantize", [quantize_to_int8, quantize_to_int4])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_constant_rows_are_exact(quantize: Any, value: float) -> None:
    assert torch.equal(numbers(quantize(torch.full((2, GROUP), value)), 2), torch.full((2, GROUP), value))


def test_sizes() -> None:
    weight = torch.randn(10, 4 * GROUP)
    assert quantize_to_int8(weight).nbytes == 10 * (4 * GROUP + 4)
    assert quantize_to_int4(weight).nbytes == 10 * 4 * (GROUP // 2 + 4)


@pytest.mark.parametrize("quantize", [quantize_to_int8, quantize_to_int4])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 70])
@pytest.mark.parametrize("num_out", [1, 16, 17, 50])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_uses_the_dequantized_weight(
    quantize: Any, num_rows: int, num_out: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MINIMUM_TILE_ROWS", 16)
    monkeypatch.setattr(module, "TILE", 16)
    plain = nn.Linear(2 * GROUP, num_out, bias=bias).requires_grad_(False)
    weight = quantize(plain.weight)
    hidden = torch.randn(1, num_rows, 2 * GROUP)
    found = QuantizedLinear(plain, weight, torch.float32)(hidden)
    torch.testing.assert_close(
        found, nn.functional.linear(hidden, numbers(weight, num_out), plain.bias), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("quantize", [quantize_to_int8, quantize_to_int4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_rows_in_either_dtype(quantize: Any, dtype: torch.dtype) -> None:
    plain = nn.Linear(4 * GROUP, 24, dtype=torch.bfloat16).requires_grad_(False)
    weight = quantize(plain.weight)
    hidden = torch.randn(3, 4 * GROUP, dtype=torch.bfloat16)
    found = QuantizedLinear(plain, weight, dtype)(hidden)
    assert found.dtype == torch.bfloat16
    right = nn.functional.linear(hidden.float(), numbers(weight, 24), plain.bias.float())
    torch.testing.assert_close(found.float(), right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("quantize", [quantize_to_int8, quantize_to_int4])
def test_rows_are_independent(quantize: Any) -> None:
    """One scale for all activations of a batch, as in torch's dynamic quantization, fails this test."""
    weight = quantize(torch.randn(40, 2 * GROUP))
    hidden = torch.randn(3, 2 * GROUP)
    hidden[1] *= 1e4
    together = multiply(hidden, weight, 40)
    for row in (0, 2):
        alone = multiply(hidden[row : row + 1], weight, 40)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_the_dtype_of_products() -> None:
    assert product_dtype(torch.float32) == torch.float32
    assert product_dtype(torch.bfloat16) in (torch.float32, torch.bfloat16)


def with_dequantized_weights(arch: str, word: str) -> PreTrainedModel:
    """A plain model with the dequantized weights of a quantized one."""
    plain, quantized = make_model(arch), ready(arch)
    quantize_linears(quantized, word)
    for name, part in quantized.named_modules():
        if isinstance(part, (QuantizedLinear, QuantizedEmbedding)):
            weight = plain.get_parameter(f"{name}.weight")
            with torch.no_grad():
                weight.copy_(part._quantized.take(torch.arange(len(weight))))
    return plain


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_equal_generate_with_dequantized_weights(arch: str, word: str) -> None:
    model = ready(arch)
    fuse_linears(model)
    quantize_linears(model, word)
    served = serve(
        make_runner(model, CROWDED), CROWDED, {name: (prompt, GREEDY) for name, prompt in PROMPTS.items()}
    )
    rounded = with_dequantized_weights(arch, word)
    right = {name: reference(rounded, prompt, 20) for name, prompt in PROMPTS.items()}
    assert_equal_tokens(served.token_ids, right)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("tied", [False, True])
def test_no_plain_weight_remains(word: str, tied: bool) -> None:
    model = ready(tie_word_embeddings=tied)
    fuse_linears(model)
    plain = [weakref.ref(one.untyped_storage()) for one in model.parameters() if one.ndim == 2]
    num_plain = len({one.data_ptr() for one in model.parameters() if one.ndim == 2})
    found = quantize_linears(model, word)
    gc.collect()
    assert [one for one in model.parameters() if one.ndim == 2] == []
    assert all(one() is None for one in plain)
    # Two layers of four products each, the embedding and the head.
    assert found.num_weights == 2 * 4 + (1 if tied else 2)
    assert num_plain >= found.num_weights
    before, after = found.num_bytes
    assert before / 5 < after < before / 3 if word == "int8" else before / 8 < after < before / 3


def test_a_tied_weight_is_quantized_once() -> None:
    model = ready(tie_word_embeddings=True)
    quantize_linears(model, "int4")
    embedding, head = model.model.embed_tokens, model.lm_head
    assert isinstance(embedding, QuantizedEmbedding)
    assert embedding._quantized is head._quantized
    # Eight bits at both ends of a model.
    assert isinstance(head._quantized, Int8Weight)
    assert isinstance(model.model.layers[0].mlp.down_proj._quantized, Int4Weight)


class OwnLinear(nn.Linear):
    """A subclass."""


def test_shared_and_unsuitable_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready()
    first, second = model.model.layers
    kept = (first.self_attn.o_proj, first.mlp.down_proj, first.mlp.up_proj, second.mlp.up_proj)
    model.other = OwnLinear(64, 64, bias=False)
    model.other.weight = first.self_attn.o_proj.weight
    with torch.no_grad():
        first.mlp.down_proj.weight[3, 5] = float("nan")
        first.mlp.up_proj.weight[0, 0] = 1e5
    second.mlp.up_proj = nn.Linear(64, 48, bias=False)
    monkeypatch.setattr(module, "_check_forward", lambda *_: None)  # its MLP has odd sizes now
    monkeypatch.setattr(module, "MINIMUM_NUMEL", 64 * 64)
    quantize_linears(model, "int4")
    assert type(first.self_attn.o_proj) is type(first.mlp.down_proj) is type(first.mlp.up_proj) is nn.Linear
    assert all(torch.is_tensor(one.weight) for one in kept)
    assert type(second.mlp.up_proj) is nn.Linear
    assert isinstance(second.mlp.down_proj, QuantizedLinear)


def test_a_width_that_is_no_multiple_of_a_group_stays_plain() -> None:
    model = ready(intermediate_size=GROUP * 3 + 8)
    quantize_linears(model, "int4")
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert isinstance(model.model.layers[0].mlp.up_proj, QuantizedLinear)


def test_a_model_without_suitable_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MINIMUM_NUMEL", 1 << 30)
    with pytest.raises(InvalidParameter, match="quantization: this model has no weight"):
        quantize_linears(ready(), "int8")


def test_a_model_that_reads_its_weights_outside_linears_is_refused() -> None:
    model = ready()
    fuse_linears(model)
    attention = model.model.layers[1].self_attn
    assert isinstance(attention.q_proj, FusedPart)
    attention.register_forward_pre_hook(lambda *_: attention.q_proj.weight.dtype)
    with pytest.raises(InvalidParameter, match="quantization: int4 does not support model type 'llama'"):
        quantize_linears(model, "int4")


def test_invalid_options_are_refused_before_loading() -> None:
    for asked, message in (
        ({"quantization": "int2"}, "must be none, int8, int4, not 'int2'"),
        ({"quantization": "int8", "deterministic": True}, "deterministic mode is for plain weights"),
    ):
        with pytest.raises(InvalidParameter, match=f"quantization: {message}"):
            build_execution("/nowhere", device="cpu", **asked)
    with pytest.raises(InvalidParameter, match="int4 is for a CPU, not cuda"):
        check_quantization("int4", deterministic=False, device=torch.device("cuda"))
    check_quantization("none", deterministic=True, device=torch.device("cuda"))


def test_an_execution_states_its_quantization(tiny_llama: Path) -> None:
    """The agreement check would fail if its model were quantized too."""
    messages: list[str] = []
    built = {
        word: build_execution(
            str(tiny_llama), device="cpu", num_kv_blocks=4, quantization=word, progress=messages.append
        )
        for word in ("none", *WORDS)
    }
    assert {word: one.quantization for word, one in built.items()} == {word: word for word in built}
    assert len({one.fingerprint for one in built.values()}) == 3
    assert built["int8"].fingerprint == f"{built['none'].fingerprint}-int8"
    assert sum("weights in int" in line for line in messages) == 2
