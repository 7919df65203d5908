"""Native norms, gated MLPs and rotary embeddings: the same tokens, and other modules stay."""

import copy
import logging
from collections import Counter
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution import plans
from engine.execution.attention.interface import ATTENTION_NAME, install
from engine.execution.layers.elementwise_operator import Activation, ElementwiseOperator, NormFormula
from engine.execution.layers.fused_linears import FusedPart, fuse_linears
from engine.execution.layers.linear_operator import LinearOperator
from engine.execution.layers.module_slots import observed_slots
from engine.execution.layers.native_elements import (
    NativeGatedMLP,
    NativeRMSNorm,
    checked_elementwise,
    replace_modules,
    use_native_elements,
)
from engine.execution.machine.native_build import CannotBuild
from tests.comparer import Reference, assert_equal_tokens, reference
from tests.engine.execution.pools import native_library
from tests.engine.execution.serving import GREEDY, make_prompts, make_runner, serve
from tests.tiny_models import ARCHITECTURES, make_model

PROMPTS = make_prompts((1, 5, 17, 33, 64))
REQUESTS = {name: (prompt, GREEDY) for name, prompt in PROMPTS.items()}
CROWDED = EngineConfig(
    max_model_len=128, num_kv_blocks=30, block_size=4, max_num_batched_tokens=24, max_num_seqs=4
)
DTYPES = (torch.float32, torch.bfloat16)

REPLACED = {
    "llama": (5, 2, 2), "qwen2": (5, 2, 2), "qwen3": (9, 2, 2), "mistral": (5, 2, 2), "gemma2": (9, 2, 2),
    "gemma3_text": (13, 2, 2), "phi3": (5, 2, 2), "gpt_neox": (0, 0, 2), "gpt2": (0, 0, 0),
    "opt": (0, 0, 0), "mixtral": (5, 0, 2), "olmo2": (9, 2, 2), "granite": (5, 2, 2), "smollm3": (5, 2, 2),
    "gpt_oss": (5, 0, 0),
}  # fmt: skip
"""Norms, gated MLPs and rotary attention of two layers. Experts and MLPs without a gate are left alone, and
so is the rotary function of gpt-oss, whose angles are not repeated for both halves."""


@cache
def expected(arch: str) -> dict[str, Reference]:
    model = make_model(arch)
    return {name: reference(model, prompt, 20) for name, prompt in PROMPTS.items()}


def ready(arch: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    install()
    model = make_model(arch, dtype=dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    return model


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_tokens_equal_generate(arch: str) -> None:
    model = ready(arch)
    assert use_native_elements(model, elementwise()) == REPLACED[arch]
    fuse_linears(model)

    served = serve(make_runner(model, CROWDED), CROWDED, REQUESTS)

    assert served.num_preempted > 0
    assert_equal_tokens(served.token_ids, expected(arch))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_has_the_same_norms_and_gates_and_nearly_the_same_logits(arch: str) -> None:
    plain, fast = make_model(arch, dtype=torch.bfloat16), ready(arch, torch.bfloat16)
    assert use_native_elements(fast, elementwise()) == REPLACED[arch]
    fast.set_attn_implementation("eager")
    token_ids = torch.tensor([PROMPTS["33 tokens"]])
    with torch.inference_mode():
        ours, theirs = (model(token_ids, use_cache=False).logits.float() for model in (fast, plain))
    # A rounding that flips in an early layer grows in later layers.
    assert float((ours - theirs).abs().mean() / theirs.abs().mean()) < 0.03


def test_the_formulas_are_those_of_the_architectures() -> None:
    found = {}
    for arch in ("llama", "gemma2", "gpt_oss"):
        model = ready(arch, torch.bfloat16)
        use_native_elements(model, elementwise())
        found[arch] = model.model.norm.formula[1:]
    assert found == {"llama": (0.0, True), "gemma2": (1.0, False), "gpt_oss": (0.0, False)}


def test_weights_and_children_keep_their_names() -> None:
    model = ready("qwen2")
    before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    names = {name for name, _ in model.named_modules()}
    assert use_native_elements(model, elementwise()) == (5, 2, 2)
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before
    assert {name for name, _ in model.named_modules()} == names


def test_linears_that_are_replaced_later_are_called() -> None:
    model = ready("qwen2")
    use_native_elements(model, elementwise())
    assert fuse_linears(model) == 2 * model.config.num_hidden_layers
    mlp: nn.Module = model.model.layers[0].mlp
    assert type(mlp) is NativeGatedMLP
    gate_proj, up_proj = mlp.gate_proj, mlp.up_proj
    assert isinstance(gate_proj, FusedPart)
    assert isinstance(up_proj, FusedPart)
    assert gate_proj.fused is up_proj.fused
    hidden = torch.randn(1, 3, model.config.hidden_size)
    gate, up = (one.weight @ hidden[0].T for one in (gate_proj, up_proj))
    expected = (silu(gate) * up).T @ mlp.get_parameter("down_proj.weight").T
    torch.testing.assert_close(mlp(hidden)[0], expected)


def test_a_second_pass_replaces_nothing() -> None:
    model = ready("gemma2")
    assert sum(use_native_elements(model, elementwise())) > 0
    once = [type(module) for module in model.modules()]
    use_native_elements(model, elementwise())
    assert Counter(type(module) for module in model.modules()) == Counter(once)


class Norm(nn.Module):
    """A norm with unusual names, or something similar."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda row: row) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(24))
        self.tiny = 1e-4
        self.change = change

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        normed = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.change(self.gamma * normed)


class Mean(Norm):
    """A layer norm, which is similar on rows with a mean near 0."""

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return super().forward(row - row.mean(-1, keepdim=True))


class OtherEpsilon(Norm):
    """Its epsilon is not an attribute, and matters for small rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = 1e-9

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return self.gamma * (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 2 * self.tiny))


class WithGate(Norm):
    """Reads more than its row."""

    def forward(self, row: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(row) if gate is None else super().forward(row) * gate


class Mlp(nn.Module):
    """A gated MLP with unusual names, or something similar."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], num_inner: int = 40) -> None:
        super().__init__()
        self.c, self.b, self.a = nn.Linear(num_inner, 24), nn.Linear(24, num_inner), nn.Linear(24, num_inner)
        self.act = act

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.c(self.b(row) * self.act(self.a(row)))
        return down


class Wide(nn.Module):
    """Gate and up are one linear. `gate_last`: their order."""

    def __init__(self, gate_last: bool) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(24, 80), nn.Linear(40, 24)
        self.gate_last = gate_last

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        first, second = self.both(row).chunk(2, -1)
        down: torch.Tensor = self.down(first * silu(second) if self.gate_last else silu(first) * second)
        return down


class Scaled(Mlp):
    """Scales its output."""

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return super().forward(row) * 1.5


class Clamped(Mlp):
    """Differs for large values."""

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.c(self.b(row).clamp(max=50.0) * self.act(self.a(row)))
        return down


class Twice(Mlp):
    """Calls a linear again."""

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = super().forward(row) + 0 * self.a(row).sum()
        return output


class WithWeight(Mlp):
    """Has another weight."""

    def __init__(self) -> None:
        super().__init__(silu)
        self.extra = nn.Parameter(torch.ones(1))


def elementwise() -> ElementwiseOperator:
    return ElementwiseOperator(native_library())


def replaced(module: nn.Module, dtype: torch.dtype = torch.float32, **named: torch.Tensor) -> nn.Module:
    """The module that replaces `module`, or `module` itself; its outputs are checked."""
    model = nn.ModuleDict({"it": module}).to(dtype).requires_grad_(False)
    hidden = torch.randn(1, 2, 24).to(dtype)
    expected = module(hidden, **named)
    operator = elementwise()
    slots = observed_slots(model, lambda: model["it"](hidden, **named))
    count = sum(replace_modules(slots, operator))
    assert count == (model["it"] is not module)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(model["it"](hidden, **named), expected, rtol=tolerance, atol=tolerance)
    return model["it"]


def test_a_norm_is_recognised_by_its_results() -> None:
    found = replaced(Norm())
    assert type(found) is NativeRMSNorm
    assert found.formula == NormFormula(1e-4, 0.0, True)


def test_a_norm_that_rounds_elsewhere_is_left_alone() -> None:
    """In bfloat16 this one rounds after every step."""
    module = Norm()
    assert replaced(module, torch.bfloat16) is module


@pytest.mark.parametrize(
    "module",
    [
        Norm(lambda row: 2 * row), Norm(lambda row: row.clamp(max=1.0)), Norm(lambda row: row.double()),
        Norm(lambda row: row + 1e-6), Mean(), OtherEpsilon(), nn.LayerNorm(24), nn.Linear(24, 24, bias=False),
    ],
)  # fmt: skip
def test_modules_similar_to_a_norm_are_left_alone(module: nn.Module) -> None:
    assert replaced(module) is module


def test_a_norm_with_a_second_argument_is_left_alone() -> None:
    module = WithGate()
    assert replaced(module, gate=torch.randn(1, 2, 24)) is module
    assert type(replaced(WithGate())) is NativeRMSNorm


def test_a_norm_in_another_dtype_than_its_rows_is_left_alone() -> None:
    model = nn.ModuleDict({"it": Norm()}).requires_grad_(False)
    slots = observed_slots(model, lambda: model["it"](torch.randn(1, 2, 24).bfloat16()))
    assert replace_modules(slots, elementwise()) == (0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("act", "activation"),
    [
        (silu, Activation.SILU),
        (nn.SiLU(), Activation.SILU),
        (partial(gelu, approximate="tanh"), Activation.GELU_TANH),
        (nn.GELU(), Activation.GELU_ERF),
    ],
)
@pytest.mark.parametrize("num_inner", [40, 24])
def test_a_gated_mlp_is_recognised_by_its_results(
    num_inner: int, act: Callable[[torch.Tensor], torch.Tensor], activation: Activation, dtype: torch.dtype
) -> None:
    """Also with equal inner and outer sizes, where shapes are ambiguous."""
    found = replaced(Mlp(act, num_inner), dtype)
    assert type(found) is NativeGatedMLP
    assert (found.form.down, found.form.activation) == ("c", activation)


@pytest.mark.parametrize("gate_last", [True, False])
def test_gate_and_up_in_one_linear(gate_last: bool) -> None:
    found = replaced(Wide(gate_last))
    assert type(found) is NativeGatedMLP
    assert found.form.gate_first is not gate_last


@pytest.mark.parametrize(
    "module",
    [
        Mlp(torch.relu), Mlp(torch.sigmoid), Mlp(lambda row: silu(1.702 * row) / 1.702), Scaled(silu),
        Clamped(silu), Twice(silu), WithWeight(), nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48,
        24)),
    ],
)  # fmt: skip
def test_modules_similar_to_a_gated_mlp_are_left_alone(module: nn.Module) -> None:
    assert replaced(module) is module


def test_torch_computes_unsupported_dtypes() -> None:
    hidden = torch.randn(1, 2, 24, dtype=torch.float64)
    for module in (Norm(), Mlp(silu)):
        expected = copy.deepcopy(module).double()(hidden)
        found = replaced(module).double()(hidden)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_operator_that_fails_its_self_check_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise CannotBuild("what was compiled disagrees")

    monkeypatch.setattr("engine.execution.layers.native_elements.check_elementwise", fail)
    with caplog.at_level(logging.WARNING):
        assert checked_elementwise(native_library()) is None
    assert "computed by torch, which is slower: what was compiled disagrees" in caplog.text


@pytest.mark.parametrize("has_library", [True, False])
def test_a_plain_model_is_prepared_with_the_library_if_there_is_one(has_library: bool) -> None:
    model = ready()
    plans.plain((), native_library() if has_library else None).prepare(model)
    kinds = Counter(type(module) for module in model.modules())
    assert (kinds[NativeRMSNorm], kinds[NativeGatedMLP]) == ((5, 2) if has_library else (0, 0))
    assert kinds[FusedPart] > 0


def test_operators_are_checked_once_for_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr("engine.execution.layers.native_elements.check_elementwise", checked.append)
    monkeypatch.setattr("engine.execution.layers.linear_operator.check_linears", checked.append)
    prepare = plans.plain((), native_library()).prepare
    for _ in range(2):
        prepare(ready())
    assert Counter(map(type, checked)) == {ElementwiseOperator: 1, LinearOperator: 1}


def test_preparing_a_model_takes_three_passes_without_logits() -> None:
    """One pass observes elements, one checks the rotary embeddings, one observes linears."""
    model, given = ready(), []
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    embeddings.register_forward_pre_hook(lambda _, args: given.append(args[0].shape))
    head.register_forward_pre_hook(lambda _, args: given.append(args[0].shape[:2]))
    plans.plain((), native_library()).prepare(model)
    assert given == [(1, 2), (1, 0)] * 3
