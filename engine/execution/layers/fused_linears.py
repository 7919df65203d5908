"""Fuses linears that read the same input into one larger product.

Which linears read the same input is observed in a forward pass, not derived from names, and verified in each
call: a part that receives another input computes the product again. The parts keep their slots in the model,
and their weights can be read there.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.execution.attention.probe import pass_of_two_tokens
from engine.execution.layers.module_slots import ModuleSlot, linear_slots
from engine.execution.machine.memory import release_cached_memory


@dataclass(slots=True)
class _Outputs:
    """The outputs for `hidden` that were not fetched yet. A module's own attributes are slow to set."""

    hidden: torch.Tensor | None
    parts: dict[int, torch.Tensor]


class FusedLinear(nn.Module):
    """The product of several linears of one input. Each part fetches its output once."""

    def __init__(self, members: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [member.out_features for member in members]
        biases = [member.bias for member in members if member.bias is not None]
        self.product = nn.Linear(
            members[0].in_features,
            sum(self.sizes),
            bias=bool(biases),
            device="meta",
            dtype=members[0].weight.dtype,
        )
        self.product.weight = _parameter(torch.cat([member.weight.detach() for member in members]))
        if biases:
            self.product.bias = _parameter(torch.cat([bias.detach() for bias in biases]))
        self._outputs = _Outputs(None, {})

    def part(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Output `index` for `hidden` [..., in]: [..., sizes[index]], a view of the whole product."""
        outputs = self._outputs
        if outputs.hidden is not hidden or index not in outputs.parts:
            outputs.hidden = hidden
            outputs.parts = dict(enumerate(torch.split_with_sizes(self.product(hidden), self.sizes, dim=-1)))
        part = outputs.parts.pop(index)
        if not outputs.parts:
            outputs.hidden = None  # Frees the activation.
        return part


class FusedPart(nn.Module):
    """One member of a fused linear, in the member's slot."""

    def __init__(self, fused: FusedLinear, index: int, member: nn.Linear) -> None:
        super().__init__()
        self.fused = fused
        self.index = index
        self.in_features = member.in_features
        self.out_features = member.out_features
        first = sum(fused.sizes[:index])
        rows = slice(first, first + member.out_features)
        # Views of the fused weight.
        self.weight = _parameter(fused.product.weight.detach()[rows])
        self.bias = None if member.bias is None else _parameter(fused.product.bias.detach()[rows])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fused.part(self.index, hidden)


def fuse_linears(model: PreTrainedModel) -> int:
    """Fuse the linears of each parent that read one input. Returns the number of fused linears.

    Left alone: subclasses of `nn.Linear`, linears in two slots or called twice, linears that share their
    weight with another module, and linears that differ in dtype or in having a bias. The members of one fused
    linear are freed before the next one is made, so the memory needed at a time is the model and one product.
    """
    groups = _readers_of_one_input(model)
    num_fused = len(groups)
    while groups:
        # Popped: the list must not keep members alive.
        fused = _fuse(groups.pop())
        release_cached_memory(fused.product.weight.device)
    return num_fused


def _fuse(slots: list[ModuleSlot[nn.Linear]]) -> FusedLinear:
    fused = FusedLinear([slot.module for slot in slots])
    for index, slot in enumerate(slots):
        slot.replace(FusedPart(fused, index, slot.module))
    return fused


def _readers_of_one_input(model: PreTrainedModel) -> list[list[ModuleSlot[nn.Linear]]]:
    slots = _exclusive_slots(model)
    calls: list[tuple[nn.Module, torch.Tensor]] = []

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        # Keeps the tensors alive, so that ids are not reused.
        calls.append((module, args[0]))

    hooks = [slot.module.register_forward_pre_hook(record) for slot in slots]
    try:
        pass_of_two_tokens(model)
    finally:
        for hook in hooks:
            hook.remove()
    num_calls = Counter(module for module, _ in calls)
    inputs = {module: id(hidden) for module, hidden in calls if num_calls[module] == 1}
    groups = defaultdict[tuple[object, ...], list[ModuleSlot[nn.Linear]]](list)
    for slot in slots:
        if slot.module in inputs:
            kind = (slot.module.weight.dtype, slot.module.weight.device, slot.module.bias is None)
            groups[slot.parent, inputs[slot.module], *kind].append(slot)
    return [members for members in groups.values() if len(members) > 1]


def _exclusive_slots(model: PreTrainedModel) -> list[ModuleSlot[nn.Linear]]:
    """Linears that have one slot and do not share their weights."""
    slots = list(linear_slots(model))
    num_slots = Counter(slot.module for slot in slots)
    num_owners = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    return [slot for slot in slots if num_slots[slot.module] == 1 == num_owners[id(slot.module.weight)]]


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
