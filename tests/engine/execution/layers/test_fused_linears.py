"""Fused and packed linears give the same tokens; only plain linears are fused."""

import weakref
from functools import cache

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention.interface import ATTENTION_NAME, install
from engine.execution.layers import packed_linears
from engine.execution.layers.fused_linears import FusedLinear, FusedPart, fuse_linears
from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.layers.packed_linears import pack_linears
from tests.comparer import Reference, assert_equal_tokens, reference
from tests.engine.execution.pools import native_library
from tests.engine.execution.serving import GREEDY, make_prompts, make_runner, serve
from tests.tiny_models import ARCHITECTURES, make_model

PROMPTS = make_prompts((1, 5, 17, 33, 64))
REQUESTS = {name: (prompt, GREEDY) for name, prompt in PROMPTS.items()}
CROWDED = EngineConfig(
    max_model_len=128, num_kv_blocks=30, block_size=4, max_num_batched_tokens=24, max_num_seqs=4
)


@cache
def expected(arch: str) -> dict[str, Reference]:
    model = make_model(arch)
    return {name: reference(model, prompt, 20) for name, prompt in PROMPTS.items()}


def ready(arch: str = "llama") -> PreTrainedModel:
    install()
    model = make_model(arch)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_equal_generate(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(arch)
    fuse_linears(model)
    monkeypatch.setattr(packed_linears, "MINIMUM_NUMEL", 0)
    num_packed = pack_linears(model, LinearOperator(native_library()), max_bytes=1 << 40)
    assert num_packed > 0 or arch == "gpt2"  # whose projections are no linears

    served = serve(make_runner(model, CROWDED), CROWDED, REQUESTS)

    assert served.num_preempted > 0
    assert_equal_tokens(served.token_ids, expected(arch))


def test_linears_that_read_one_input_are_fused() -> None:
    model = ready("qwen2")
    assert fuse_linears(model) == 2 * model.config.num_hidden_layers

    layer = model.model.layers[0]
    assert layer.self_attn.q_proj.fused is layer.self_attn.k_proj.fused is layer.self_attn.v_proj.fused
    assert layer.mlp.gate_proj.fused is layer.mlp.up_proj.fused
    assert type(layer.self_attn.o_proj) is type(layer.mlp.down_proj) is type(model.lm_head) is nn.Linear


def test_the_weight_of_a_part_is_a_view_of_the_fused_weight() -> None:
    model, plain = ready("qwen2"), ready("qwen2")
    fuse_linears(model)
    parts = model.model.layers[0].self_attn
    originals = plain.model.layers[0].self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        part, original = getattr(parts, name), getattr(originals, name)
        assert torch.equal(part.weight, original.weight)
        assert torch.equal(part.bias, original.bias)
        assert (part.in_features, part.out_features) == (original.in_features, original.out_features)
        whole = part.fused.product.weight
        assert part.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_members_are_freed_before_the_next_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fusing needs the memory of the model and of one product, never all weights twice."""
    model = ready("llama")
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    originals = [
        weakref.ref(weight)
        for name, weight in model.named_parameters()
        if any(part in name for part in names)
    ]
    alive: list[int] = []
    init = FusedLinear.__init__

    def counting(self: FusedLinear, linears: list[nn.Linear]) -> None:
        alive.append(sum(one() is not None for one in originals))
        init(self, linears)

    monkeypatch.setattr(FusedLinear, "__init__", counting)
    num_products = fuse_linears(model)
    left = sum(one() is not None for one in originals)
    # Fusions of three and of two weights alternate; each frees its members before the next one.
    assert len(alive) == num_products
    assert sorted(before - after for before, after in zip(alive, [*alive[1:], left], strict=True)) == (
        [2] * (num_products // 2) + [3] * (num_products // 2)
    )
    assert (alive[0], left) == (len(originals), 0)


def members(*sizes: int, num_inputs: int = 6) -> list[nn.Linear]:
    return [nn.Linear(num_inputs, size).requires_grad_(False) for size in sizes]


def test_parts_may_be_called_in_any_order_with_any_inputs() -> None:
    linears = members(3, 4, 5)
    fused = FusedLinear(linears)
    parts = [FusedPart(fused, index, one) for index, one in enumerate(linears)]
    first, second = torch.randn(2, 6), torch.randn(1, 7, 6)
    for index, hidden in (
        (2, first),
        (0, first),
        (0, second),
        (0, second),
        (1, first),
        (2, second),
        (1, second),
    ):
        torch.testing.assert_close(parts[index](hidden), linears[index](hidden))


def test_a_product_is_computed_once_and_then_freed() -> None:
    linears = members(3, 4)
    fused = FusedLinear(linears)
    calls: list[object] = []
    fused.product.register_forward_pre_hook(lambda *_: calls.append(None))
    hidden = torch.randn(2, 6)
    first, second = fused.part(0, hidden), fused.part(1, hidden)
    assert len(calls) == 1
    torch.testing.assert_close(
        torch.cat([first, second], -1), torch.cat([one(hidden) for one in linears], -1)
    )
    # Changed in place: the same tensor with other values.
    hidden.zero_()
    torch.testing.assert_close(fused.part(0, hidden), linears[0](hidden))
    fused.part(1, hidden)
    kept = weakref.ref(hidden)
    del hidden
    assert kept() is None


class Block(nn.Module):
    """Linears that must not be fused, beside two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.twice, self.of_other = members(6, 6, 6, 6)
        self.special = _Special(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = nn.Parameter(torch.randn(6, 6))
        self.owner = nn.Embedding(6, 6)
        self.owner.weight = self.tied.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(hidden) + self.b(hidden) + self.special(hidden) + self.tied(hidden)
        out += self.twice(hidden + 2) + self.twice(hidden) + self.of_other(hidden + 1)
        return out


class _Special(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def test_linears_that_are_not_plain_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block()
    hidden = torch.randn(3, 6)
    expected = block(hidden)
    monkeypatch.setattr(
        "engine.execution.layers.fused_linears.pass_of_two_tokens", lambda model: model(hidden)
    )

    assert fuse_linears(block) == 1  # type: ignore[arg-type]  # any module will do

    fused = [name for name, child in block.named_children() if type(child) is FusedPart]
    assert fused == ["a", "b"]
    torch.testing.assert_close(block(hidden), expected)
