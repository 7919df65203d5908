"""The native rotary embedding: the same bits, in one model only."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from engine.execution.attention.interface import ATTENTION_NAME, install
from engine.execution.attention.probe import pass_of_two_tokens
from engine.execution.layers.elementwise_operator import ElementwiseOperator
from engine.execution.layers.native_rotary import FUNCTION, NativeRotary, use_native_rotary
from tests.engine.execution.pools import native_library
from tests.tiny_models import make_model

DTYPES = (torch.float32, torch.bfloat16)
PLAIN = modeling_llama.apply_rotary_pos_emb
"""Bound now, as some tests replace the global."""
Angles = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def operator() -> ElementwiseOperator:
    return ElementwiseOperator(native_library())


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> Angles:
    """Independent values in both halves, so that a wrong index shows."""
    return noise(1, num_rows, size, dtype=dtype, seed=1), noise(1, num_rows, size, dtype=dtype, seed=2)


def ready(arch: str = "llama") -> PreTrainedModel:
    install()
    model = make_model(arch)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def forwards(model: PreTrainedModel) -> list[Any]:
    return [vars(module).get("forward") for module in model.modules() if "forward" in vars(module)]


@given(
    num_rows=st.integers(0, 40),
    num_heads=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    half=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    views=st.tuples(st.booleans(), st.booleans()),
)
def test_the_bits_are_those_of_transformers(
    operator: ElementwiseOperator,
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    half: int,
    dtype: torch.dtype,
    views: tuple[bool, bool],
) -> None:
    """Views of a fused product and contiguous tensors."""
    heads = num_heads + num_kv_heads
    fused = noise(1, num_rows, heads, 2 * half, dtype=dtype).transpose(1, 2)
    query, key = fused[:, :num_heads], fused[:, num_heads:]
    query = query if views[0] else query.contiguous()
    key = key if views[1] else key.contiguous()
    cosine, sine = angles(num_rows, 2 * half, dtype)

    found = operator.rotate(query, key, cosine, sine)

    assert found is not None
    right = PLAIN(query, key, cosine, sine)
    assert all(map(torch.equal, found, right))
    assert [one.dtype for one in found] == [dtype, dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_by_several_threads(
    operator: ElementwiseOperator, dtype: torch.dtype, threads: int
) -> None:
    before = torch.get_num_threads()
    query, key = noise(1, 9, 300, 64, dtype=dtype), noise(1, 3, 300, 64, dtype=dtype, seed=3)
    cosine, sine = angles(300, 64, dtype)
    torch.set_num_threads(threads)
    try:
        found = operator.rotate(query, key, cosine, sine)
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert all(map(torch.equal, found, PLAIN(query, key, cosine, sine)))


def test_nan_and_infinity_propagate(operator: ElementwiseOperator) -> None:
    query, key = noise(1, 2, 4, 16), noise(1, 1, 4, 16)
    query[0, 0, 0, 3], query[0, 1, 2, 9], key[0, 0, 1, 0] = torch.nan, torch.inf, -torch.inf
    cosine, sine = angles(4, 16)
    found = operator.rotate(query, key, cosine, sine)
    assert found is not None
    for ours, theirs in zip(found, PLAIN(query, key, cosine, sine), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def unfit_calls() -> dict[str, tuple[torch.Tensor, ...]]:
    query, key, (cosine, sine) = noise(1, 2, 3, 8), noise(1, 1, 3, 8), angles(3, 8)
    odd = (noise(1, 2, 3, 7), noise(1, 1, 3, 7), *angles(3, 7))
    return {
        "two batches": (noise(2, 2, 3, 8), noise(2, 1, 3, 8), cosine, sine),
        "angles of a half": (query, key, *angles(3, 4)),
        "angles of fewer rows": (query, key, *angles(2, 8)),
        "keys of other rows": (query, noise(1, 1, 2, 8), cosine, sine),
        "another dtype": tuple(one.double() for one in (query, key, cosine, sine)),
        "angles of another dtype": (query, key, cosine.bfloat16(), sine),
        "an odd size": odd,
        "no heads": (query[:, 0], key[:, 0], cosine, sine),
    }


@pytest.mark.parametrize("name", unfit_calls())
def test_unsupported_tensors_are_refused(operator: ElementwiseOperator, name: str) -> None:
    assert operator.rotate(*unfit_calls()[name]) is None


def test_only_this_model_changes(operator: ElementwiseOperator) -> None:
    model, other = ready(), ready()
    function = modeling_llama.apply_rotary_pos_emb
    assert use_native_rotary(model, operator, pass_of_two_tokens(model)) == model.config.num_hidden_layers
    assert modeling_llama.apply_rotary_pos_emb is function
    assert forwards(other) == []
    assert all(type(one.__func__.__globals__[FUNCTION]) is NativeRotary for one in forwards(model))


def test_a_second_pass_replaces_nothing(operator: ElementwiseOperator) -> None:
    model = ready()
    assert use_native_rotary(model, operator, pass_of_two_tokens(model)) > 0
    assert use_native_rotary(model, operator, pass_of_two_tokens(model)) == 0


def test_a_copy_of_the_model_runs_its_own_modules(operator: ElementwiseOperator) -> None:
    model = ready()
    use_native_rotary(model, operator, pass_of_two_tokens(model))
    twin = copy.deepcopy(model)
    with torch.inference_mode():
        twin.model.layers[0].self_attn.q_proj.weight.zero_()
    assert not torch.equal(pass_of_two_tokens(model)[0].query, pass_of_two_tokens(twin)[0].query)
    assert not pass_of_two_tokens(twin)[0].query.any()


def test_the_model_calls_the_operator(operator: ElementwiseOperator) -> None:
    model, asked = ready(), []

    class Watched(ElementwiseOperator):
        def rotate(self, *given: torch.Tensor) -> Angles | None:
            asked.append(given)
            return super().rotate(*given)

    use_native_rotary(model, Watched(native_library()), pass_of_two_tokens(model))
    asked.clear()
    pass_of_two_tokens(model)
    assert len(asked) == model.config.num_hidden_layers


def interleaved(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Angles:
    """Rotates adjacent pairs, as GPT-J does."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cosine[:, None] + turned * sine[:, None]

    return turn(query), turn(key)


def backwards(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Angles:
    turned: Angles = PLAIN(query, key, cosine, -sine)
    return turned


def queries_alone(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Angles:
    turned: torch.Tensor = PLAIN(query, key, cosine, sine)[0]
    return turned, key


def wide(query: torch.Tensor, key: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Angles:
    """Computes in float32 for every dtype."""
    given = (one.float() for one in (query, key, cosine, sine))
    turned_query, turned_key = PLAIN(*given)
    return turned_query.to(query.dtype), turned_key.to(key.dtype)


def of_one_tensor(query: torch.Tensor, key: torch.Tensor) -> Angles:
    return query, key


@pytest.mark.parametrize("function", [interleaved, backwards, queries_alone, wide, of_one_tensor])
def test_other_rotary_functions_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, operator: ElementwiseOperator, function: Callable[..., Angles]
) -> None:
    model = ready()
    before = pass_of_two_tokens(model)
    forward = inspect.unwrap(modeling_llama.LlamaAttention.forward)
    monkeypatch.setitem(forward.__globals__, FUNCTION, function)
    assert use_native_rotary(model, operator, before) == 0
    assert forwards(model) == []


def test_calls_with_more_arguments_use_the_models_own_function(operator: ElementwiseOperator) -> None:
    calls: list[tuple[Any, ...]] = []

    def plain(*given: Any, **named: Any) -> Angles:
        calls.append((*given[4:], *named.items()))
        return given[0], given[1]

    given = (noise(1, 2, 3, 8), noise(1, 1, 3, 8), *angles(3, 8))
    fast = NativeRotary(operator, plain)
    assert fast(*given, 2)[0] is given[0]
    assert fast(*given, unsqueeze_dim=2)[0] is given[0]
    assert calls == [(2,), (("unsqueeze_dim", 2),)]
    assert all(map(torch.equal, fast(*given), PLAIN(*given)))
    assert len(calls) == 2


def test_a_replacement_that_changes_queries_is_reverted(
    monkeypatch: pytest.MonkeyPatch, operator: ElementwiseOperator
) -> None:
    """A decorator of `forward` may have effects."""
    model = ready()
    plain = modeling_llama.LlamaAttention.forward

    def halved(self: nn.Module, hidden_states: torch.Tensor, *others: Any, **named: Any) -> Any:
        return plain(self, hidden_states / 2, *others, **named)

    halved.__wrapped__ = plain  # type: ignore[attr-defined]  # as a decorator writes it
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", halved)
    before = [call.query for call in pass_of_two_tokens(model)]
    assert use_native_rotary(model, operator, pass_of_two_tokens(model)) == 0
    assert forwards(model) == []
    assert all(map(torch.equal, before, (call.query for call in pass_of_two_tokens(model))))
