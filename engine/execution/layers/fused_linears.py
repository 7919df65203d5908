"""Linears that read the same input become one product: one pass over the input, one larger matrix.

Law: which linears read the same input is seen in a forward pass, never taken from their names, and looked at
again in each call: a part that is given another input than its mates computes anew. The parts keep their
places in the module tree, and their weights can be read there. Knows no model, and nothing of how a product
is computed.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.execution.attention.probe import pass_of_two_tokens
from engine.execution.layers.linear_slots import LinearSlot, linear_slots
from engine.execution.machine.memory import release_cached_memory


@dataclass(slots=True)
class _Outputs:
    """Those of `hidden` that no part has fetched yet. Not attributes of a module: those are slow to set."""

    hidden: torch.Tensor | None
    parts: dict[int, torch.Tensor]


class FusedLinear(nn.Module):
    """The product of several linears of one input; its parts fetch their outputs one after the other."""

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
        self._seen = _Outputs(None, {})

    def part(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Output `index` of `hidden` [..., in]: [..., sizes[index]], a view of the whole product."""
        seen = self._seen
        if seen.hidden is not hidden or index not in seen.parts:
            seen.hidden = hidden
            seen.parts = dict(enumerate(torch.split_with_sizes(self.product(hidden), self.sizes, dim=-1)))
        part = seen.parts.pop(index)
        if not seen.parts:
            seen.hidden = None  # Else the activation would live on, and nobody counts it.
        return part


class FusedPart(nn.Module):
    """One of the linears, where it stood before."""

    def __init__(self, fused: FusedLinear, index: int, member: nn.Linear) -> None:
        super().__init__()
        self.fused = fused
        self.index = index
        self.in_features = member.in_features
        self.out_features = member.out_features
        first = sum(fused.sizes[:index])
        rows = slice(first, first + member.out_features)
        # Views: no memory of their own.
        self.weight = _parameter(fused.product.weight.detach()[rows])
        self.bias = None if member.bias is None else _parameter(fused.product.bias.detach()[rows])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fused.part(self.index, hidden)


def fuse_linears(model: PreTrainedModel) -> int:
    """Make one product of the linears of one parent that read one input; gives how many products.

    Left alone: what is no plain `nn.Linear`, what stands in two places or is called twice, what shares its
    weight with another module, and linears whose dtype or having a bias differs. The originals of one
    product are freed before the next product is made, so the model never needs more than its own memory and
    that of one product.
    """
    groups = _readers_of_one_input(model)
    num_products = len(groups)
    while groups:
        # Popped, and given up on return: the list holds no original that was copied.
        fused = _fuse(groups.pop())
        release_cached_memory(fused.product.weight.device)
    return num_products


def _fuse(places: list[LinearSlot]) -> FusedLinear:
    fused = FusedLinear([place.linear for place in places])
    for index, place in enumerate(places):
        place.put(FusedPart(fused, index, place.linear))
    return fused


def _readers_of_one_input(model: PreTrainedModel) -> list[list[LinearSlot]]:
    places = _own_places(model)
    calls: list[tuple[nn.Module, torch.Tensor]] = []

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        # The tensors are kept, so that no two have one id.
        calls.append((module, given[0]))

    hooks = [place.linear.register_forward_pre_hook(note) for place in places]
    try:
        pass_of_two_tokens(model)
    finally:
        for hook in hooks:
            hook.remove()
    num_calls = Counter(module for module, _ in calls)
    inputs = {module: id(given) for module, given in calls if num_calls[module] == 1}
    groups = defaultdict[tuple[object, ...], list[LinearSlot]](list)
    for place in places:
        if place.linear in inputs:
            kind = (place.linear.weight.dtype, place.linear.weight.device, place.linear.bias is None)
            groups[place.parent, inputs[place.linear], *kind].append(place)
    return [members for members in groups.values() if len(members) > 1]


def _own_places(model: PreTrainedModel) -> list[LinearSlot]:
    """Linears that stand in one place and own their weights."""
    places = list(linear_slots(model))
    num_places = Counter(place.linear for place in places)
    num_owners = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    return [place for place in places if num_places[place.linear] == 1 == num_owners[id(place.linear.weight)]]


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
