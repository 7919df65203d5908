"""Fuses activation and product of gated MLPs, down(activation(gate(x)) * up(x)), in a native operator.

A gated MLP is recognised by its results, not its name: one of its linears reads, bit for bit, the formula of
the outputs of the linears that read the module's input, and returns the module's output. This is checked on
random rows of several scales in the model's dtype. Other modules are left alone. The children keep their
names and are looked up in each call, so a linear that is replaced later is used. Results differ by rounding,
and the bits of a row do not depend on the other rows.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.execution.layers.elementwise_operator import Activation, ElementwiseOperator
from engine.execution.layers.module_slots import ObservedSlot
from engine.execution.machine.native_library import DTYPES

SCALES = (1e-2, 1.0, 3.0, 10.0, 30.0, 1e3)
"""Of the rows that are compared. The largest reveals a clamp; the others the tails of the activation."""


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


def use_native_gates(slots: list[ObservedSlot], operator: ElementwiseOperator) -> int:
    """Replace the gated MLPs in `slots`. Returns their number."""
    num_gates = 0
    for observed in slots:
        linears = _linears(observed)
        if linears and (form := _find_form(observed, linears)) is not None:
            observed.slot.replace(NativeGatedMLP(operator, form, observed.module))
            num_gates += 1
    return num_gates


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
        run = _run(observed.module, linears, torch.cat(observed.samples(SCALES), dim=-2))
        if run.inputs.keys() != linears.keys():
            return None
        return next((form for form in _candidates(run, linears) if _explains(form, run)), None)


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


def _candidates(run: _Run, linears: dict[str, nn.Linear]) -> Iterator[GateForm]:
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
