"""In gated MLPs, down(activation(gate(x)) * up(x)), activation and product become one native operation.

Law: a module is a gated MLP by what it does and not by its name: one of its linears reads what the formula
makes of the outputs of those that read its input, to the last bit, and gives the module's output. This is
seen on random rows of several sizes in the model's dtype. Anything else is left alone. All children keep
their names, and are looked up in each call: what is put in the place of a linear later is used. Results
differ by rounding only, and a row's bits do not depend on the rows beside it.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.execution.layers.elementwise_operator import Activation, ElementwiseOperator
from engine.execution.layers.module_slots import SeenPlace
from engine.execution.machine.native_library import DTYPES

SCALES = (1e-2, 1.0, 3.0, 10.0, 30.0, 1e3)
"""Of the rows that are tried; the largest shows a bound. Activations are most unlike where a gate is about to
close, at some number in between."""


class GateForm(NamedTuple):
    """Which children of an MLP do what, by name.

    `readers`: (gate, up), or one whose output is both, side by side; `gate_first`: in which order then.
    """

    readers: tuple[str, ...]
    down: str
    gate_first: bool
    activation: Activation

    def halves(self, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up in what the readers gave."""
        first, second = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
        return (first, second) if self.gate_first else (second, first)

    def product(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        """What goes down, as torch computes it."""
        gate, up = self.halves(outputs)
        return self.activation.of(gate) * up


class FastGate(nn.Module):
    """An MLP of `form` with the children of `plain`; what the operator does not take, torch computes."""

    def __init__(self, operator: ElementwiseOperator, form: GateForm, plain: nn.Module) -> None:
        super().__init__()
        for name, child in plain.named_children():
            self.add_module(name, child)
        self.form = form
        self._native = operator.gate(form.activation)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [..., in] -> [..., out of down]."""
        outputs = [self._call(name, hidden) for name in self.form.readers]
        product = self._native(*self.form.halves(outputs))
        return self._call(self.form.down, self.form.product(outputs) if product is None else product)

    def _call(self, name: str, given: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = getattr(self, name)(given)
        return output


def use_native_gates(places: list[SeenPlace], operator: ElementwiseOperator) -> int:
    """Put fast gates where there are gated MLPs; gives how many."""
    num_gates = 0
    for place in places:
        linears = _linears(place)
        if linears and (form := _form_of(place, linears)) is not None:
            place.put(FastGate(operator, form, place.module))
            num_gates += 1
    return num_gates


def _linears(place: SeenPlace) -> dict[str, nn.Linear]:
    """Of a module that may be an MLP; none if it has weights besides."""
    linears = {name: one for name, one in place.module.named_children() if type(one) is nn.Linear}
    num_weights = sum(len(list(one.parameters())) for one in linears.values())
    is_all = num_weights == len(list(place.module.parameters())) and not list(place.module.buffers())
    has_rows = len(place.shape) > 1
    return linears if is_all and len(linears) in (2, 3) and place.dtype in DTYPES and has_rows else {}


class _Run(NamedTuple):
    """What a module was given and gave, and each of its linears that was called once."""

    given: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    probe: torch.Tensor
    output: Any


def _form_of(place: SeenPlace, linears: dict[str, nn.Linear]) -> GateForm | None:
    """The first that explains what the module did; None: it is something else."""
    with torch.inference_mode():
        # Rows of all sizes at once: each run reads all weights.
        run = _run(place.module, linears, torch.cat(place.probes(SCALES), dim=-2))
        if run.given.keys() != linears.keys():
            return None
        for form in _forms(run, linears):
            if _explains(form, run):
                return form
    return None


def _run(module: nn.Module, linears: dict[str, nn.Linear], probe: torch.Tensor) -> _Run:
    """One forward; a linear that was called twice is left out."""
    calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    hooks = [
        one.register_forward_hook(lambda _, given, output, name=name: calls.append((name, given[0], output)))
        for name, one in linears.items()
    ]
    try:
        output = module(probe)
    finally:
        for hook in hooks:
            hook.remove()
    names = Counter(name for name, _, _ in calls)
    once = [call for call in calls if names[call[0]] == 1]
    return _Run(
        given={name: given for name, given, _ in once},
        outputs={name: gave for name, _, gave in once},
        probe=probe,
        output=output,
    )


def _forms(run: _Run, linears: dict[str, nn.Linear]) -> Iterator[GateForm]:
    """Those that the shapes allow."""
    readers = tuple(name for name in linears if run.given[name] is run.probe)
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
    product = form.product([run.outputs[name] for name in form.readers])
    return torch.equal(product, run.given[form.down]) and _same(run.outputs[form.down], run.output)


def _same(left: torch.Tensor, right: object) -> bool:
    return isinstance(right, torch.Tensor) and torch.equal(left, right)
