"""Finds the modules of a model that can be replaced by faster ones."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from engine.execution.machine.self_check import seeded_randn

M = TypeVar("M", bound=nn.Module)


class ModuleSlot(NamedTuple, Generic[M]):
    """`module` is the child `name` of `parent`."""

    parent: nn.Module
    name: str
    module: M

    def replace(self, module: nn.Module) -> None:
        setattr(self.parent, self.name, module)


class ObservedSlot(NamedTuple):
    """A slot whose module has read one tensor, of `shape` and `dtype`, in its last call."""

    slot: ModuleSlot[nn.Module]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def module(self) -> nn.Module:
        return self.slot.module

    def samples(self, scales: tuple[float, ...]) -> list[torch.Tensor]:
        """Random tensors of the observed shape and dtype, one for each scale; always the same."""
        randn = seeded_randn()
        return [(scale * randn(*self.shape)).to(self.dtype) for scale in scales]


def module_slots(model: nn.Module) -> Iterator[ModuleSlot[nn.Module]]:
    """All slots. A module that occupies two slots is returned twice."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            yield ModuleSlot(parent, name, child)


def linear_slots(model: nn.Module) -> Iterator[ModuleSlot[nn.Linear]]:
    """The slots of plain linears. A subclass of `nn.Linear` may compute something else, so it is left out."""
    for parent, name, child in module_slots(model):
        if type(child) is nn.Linear:
            yield ModuleSlot(parent, name, child)


def observed_slots(model: nn.Module, forward: Callable[[], object]) -> list[ObservedSlot]:
    """The slots on a CPU whose modules read one tensor, and nothing else, in each call of `forward`."""
    seen: dict[nn.Module, torch.Tensor] = {}
    others: set[nn.Module] = set()

    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor) and args[0].is_cpu:
            seen[module] = args[0]
        else:
            others.add(module)

    hooks = [one.register_forward_pre_hook(observe, with_kwargs=True) for one in model.modules()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return [
        ObservedSlot(slot, seen[slot.module].shape, seen[slot.module].dtype)
        for slot in module_slots(model)
        if slot.module in seen and slot.module not in others
    ]
