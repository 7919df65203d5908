"""The modules of a model that were seen in a forward pass to read one tensor, for those who put something
faster in their places.

Law: a module that was ever given anything else beside its tensor is not among them. Changes nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class SeenPlace(NamedTuple):
    """`module` stands as `name` in `parent`, and was last given a tensor of `shape` and `dtype`."""

    parent: nn.Module
    name: str
    module: nn.Module
    shape: torch.Size
    dtype: torch.dtype

    def put(self, module: nn.Module) -> None:
        """Another in its place."""
        setattr(self.parent, self.name, module)

    def probes(self, scales: tuple[float, ...]) -> list[torch.Tensor]:
        """Random tensors such as it was given, of several sizes; always the same ones."""
        generator = torch.Generator().manual_seed(0)
        return [(scale * torch.randn(self.shape, generator=generator)).to(self.dtype) for scale in scales]


def module_slots(model: nn.Module, forward: Callable[[], object]) -> list[SeenPlace]:
    """The places of all modules on a CPU that read one tensor in `forward`, which runs the model.

    A module that stands in two places comes twice.
    """
    seen: dict[nn.Module, torch.Tensor] = {}
    others: set[nn.Module] = set()

    def note(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if len(given) == 1 and not named and isinstance(given[0], torch.Tensor) and given[0].is_cpu:
            seen[module] = given[0]
        else:
            others.add(module)

    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in model.modules()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return [
        SeenPlace(parent, name, child, seen[child].shape, seen[child].dtype)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if child in seen and child not in others
    ]
