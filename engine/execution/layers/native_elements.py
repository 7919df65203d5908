"""Replaces the norms, gated MLPs and rotary embeddings of a model with native operators.

Norms and gated MLPs are recognised by their results, not their names. In the model's dtype, on random rows of
several scales, the output of a norm equals a formula's bit for bit; in a gated MLP, down(activation(gate(x))
* up(x)), one linear reads, bit for bit, the formula of the outputs of the linears that read the module's
input, and returns the module's output. Other modules are left alone. Replaced modules keep their weights and
children; results differ by rounding, and the bits of a row do not depend on the other rows.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.execution.attention.probe import SeenCall, pass_of_two_tokens
from engine.execution.layers.elementwise_operator import (
    Activation,
    ElementwiseOperator,
    NormFormula,
    check_elementwise,
)
from engine.execution.layers.module_slots import ObservedSlot, observed_slots
from engine.execution.layers.native_rotary import use_native_rotary
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import DTYPES, NativeLibrary

log = logging.getLogger(__name__)

NORM_SCALES = (1e-3, 1.0, 1e3)
"""Of the rows that are compared. The smallest reveals epsilon, the largest a clamp."""
NORM_KINDS = ((0.0, True), (0.0, False), (1.0, False))
"""`offset` and `rounds_first` of Llama, gpt-oss and Gemma."""
GATE_SCALES = (1e-2, 1.0, 3.0, 10.0, 30.0, 1e3)
"""The largest reveals a clamp; the others the tails of the activation."""


class Replaced(NamedTuple):
    """Numbers of replaced modules."""

    norms: int
    gates: int
    rotations: int


def checked_elementwise(library: NativeLibrary | None) -> ElementwiseOperator | None:
    """The operator of `library`; None without a library, or, with a warning, if the self-check fails."""
    if library is None:
        return None
    try:
        operator = ElementwiseOperator(library)
        check_elementwise(operator)
    except CannotBuild as error:
        log.warning("norms, gates and rotary embeddings are computed by torch, which is slower: %s", error)
        return None
    return operator


def use_native_elements(model: PreTrainedModel, operator: ElementwiseOperator) -> Replaced:
    """Replace the norms, gated MLPs and rotary embeddings that are recognised."""
    calls: list[SeenCall] = []
    slots = observed_slots(model, lambda: calls.extend(pass_of_two_tokens(model)))
    # Rotary embeddings first: native norms round differently, which changes the recorded queries and keys.
    rotations = use_native_rotary(model, operator, calls)
    return Replaced(*replace_modules(slots, operator), rotations)


def replace_modules(slots: list[ObservedSlot], operator: ElementwiseOperator) -> tuple[int, int]:
    """Replace norms and gated MLPs. Returns their numbers."""
    counts: Counter[type[nn.Module]] = Counter()
    for observed in slots:
        module = _native_norm(observed, operator) or _native_gated_mlp(observed, operator)
        if module is not None:
            observed.slot.replace(module)
            counts[type(module)] += 1
    return counts[NativeRMSNorm], counts[NativeGatedMLP]


class NativeRMSNorm(nn.Module):
    """A norm of `formula` with `weight` [size]. torch computes what the operator does not support."""

    def __init__(self, operator: ElementwiseOperator, formula: NormFormula, weight: nn.Parameter) -> None:
        super().__init__()
        self.formula = formula
        self.weight = weight
        self._native = operator.norm(formula, weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., size] -> the same shape."""
        normed = self._native(hidden)
        return self.formula.reference(hidden, self.weight) if normed is None else normed


def _native_norm(observed: ObservedSlot, operator: ElementwiseOperator) -> NativeRMSNorm | None:
    weight = _only_weight(observed)
    formula = None if weight is None else _find_formula(observed, weight)
    return None if weight is None or formula is None else NativeRMSNorm(operator, formula, weight)


def _only_weight(observed: ObservedSlot) -> nn.Parameter | None:
    """The module's only parameter, if it is a vector as long as the observed rows; else None."""
    module = observed.module
    weights, buffers = list(module.parameters()), list(module.buffers())
    if len(weights) != 1 or buffers or len(list(module.modules())) > 1:
        return None
    (weight,) = weights
    fits = weight.shape == observed.shape[-1:] and weight.dtype == observed.dtype and weight.dtype in DTYPES
    return weight if fits else None


def _find_formula(observed: ObservedSlot, weight: nn.Parameter) -> NormFormula | None:
    """The first formula that reproduces the module's outputs, or None."""
    with torch.inference_mode():
        samples = observed.samples(NORM_SCALES)
        outputs = [observed.module(sample.clone()) for sample in samples]
        for formula in _norm_candidates(observed.module):
            expected = (formula.reference(sample, weight) for sample in samples)
            if all(map(_same_bits, outputs, expected)):
                return formula
    return None


def _norm_candidates(module: nn.Module) -> Iterator[NormFormula]:
    """Formulas with each float attribute of the module as epsilon."""
    for value in list(vars(module).values()):
        if isinstance(value, float):
            for offset, rounds_first in NORM_KINDS:
                yield NormFormula(value, offset, rounds_first)


def _same_bits(left: object, right: torch.Tensor) -> bool:
    return isinstance(left, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)


class GateForm(NamedTuple):
    """The roles of an MLP's children, by name.

    `readers`: (gate, up), or one linear that returns both, concatenated. `gate_first`: their order.
    """

    readers: tuple[str, ...]
    down: str
    gate_first: bool
    activation: Activation

    def split(self, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up in the outputs of the readers."""
        first, second = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
        return (first, second) if self.gate_first else (second, first)

    def reference(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """The input of `down` as torch computes it."""
        gate, up = self.split(outputs)
        return self.activation.reference(gate) * up


class NativeGatedMLP(nn.Module):
    """An MLP of `form` with the children of `plain`. torch computes what the operator does not support."""

    def __init__(self, operator: ElementwiseOperator, form: GateForm, plain: nn.Module) -> None:
        super().__init__()
        for name, child in plain.named_children():
            self.add_module(name, child)
        self.form = form
        self._native = operator.gate(form.activation)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., in] -> [..., out of down]."""
        outputs = [getattr(self, name)(hidden) for name in self.form.readers]
        product = self._native(*self.form.split(outputs))
        down: torch.Tensor = getattr(self, self.form.down)(
            self.form.reference(outputs) if product is None else product
        )
        return down


def _native_gated_mlp(observed: ObservedSlot, operator: ElementwiseOperator) -> NativeGatedMLP | None:
    linears = _linears(observed)
    form = _find_form(observed, linears) if linears else None
    return None if form is None else NativeGatedMLP(operator, form, observed.module)


def _linears(observed: ObservedSlot) -> dict[str, nn.Linear]:
    """The linears of a possible MLP; empty if the module has other weights."""
    module = observed.module
    linears = {name: one for name, one in module.named_children() if type(one) is nn.Linear}
    num_weights = sum(len(list(one.parameters())) for one in linears.values())
    is_all = num_weights == len(list(module.parameters())) and not list(module.buffers())
    has_rows = len(observed.shape) > 1
    return linears if is_all and len(linears) in (2, 3) and observed.dtype in DTYPES and has_rows else {}


class _Run(NamedTuple):
    """One call of a module: its input and output, and those of each linear that was called once."""

    sample: torch.Tensor
    output: Any
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]


def _find_form(observed: ObservedSlot, linears: dict[str, nn.Linear]) -> GateForm | None:
    """The first form that explains the module's output, or None."""
    with torch.inference_mode():
        # All scales in one call, as each call reads all weights.
        run = _run(observed.module, linears, torch.cat(observed.samples(GATE_SCALES), dim=-2))
        if run.inputs.keys() != linears.keys():
            return None
        return next((form for form in _gate_candidates(run, linears) if _explains(form, run)), None)


def _run(module: nn.Module, linears: dict[str, nn.Linear], sample: torch.Tensor) -> _Run:
    calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    hooks = [
        one.register_forward_hook(lambda _, args, output, name=name: calls.append((name, args[0], output)))
        for name, one in linears.items()
    ]
    try:
        output = module(sample)
    finally:
        for hook in hooks:
            hook.remove()
    counts = Counter(name for name, _, _ in calls)
    once = [call for call in calls if counts[call[0]] == 1]
    return _Run(
        sample,
        output,
        inputs={name: read for name, read, _ in once},
        outputs={name: result for name, _, result in once},
    )


def _gate_candidates(run: _Run, linears: dict[str, nn.Linear]) -> Iterator[GateForm]:
    """The forms that the shapes allow."""
    readers = tuple(name for name in linears if run.inputs[name] is run.sample)
    others = [name for name in linears if name not in readers]
    if len(others) != 1:
        return
    (down,) = others
    inner = linears[down].in_features
    sizes = [linears[name].out_features for name in readers]
    if sizes in ([inner, inner], [2 * inner]):
        for activation in Activation:
            for gate_first in (True, False):
                yield GateForm(readers, down, gate_first, activation)


def _explains(form: GateForm, run: _Run) -> bool:
    product = form.reference([run.outputs[name] for name in form.readers])
    is_output = isinstance(run.output, torch.Tensor) and torch.equal(run.outputs[form.down], run.output)
    return is_output and torch.equal(product, run.inputs[form.down])
