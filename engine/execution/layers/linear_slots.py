"""The plain linears of a model and where they stand, for those who put something faster in their places.

Law: a subclass of `nn.Linear` may do something of its own and is not among them. Changes nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn


class LinearSlot(NamedTuple):
    """`linear` stands as `name` in `parent`."""

    parent: nn.Module
    name: str
    linear: nn.Linear

    def put(self, module: nn.Module) -> None:
        """Another in its place."""
        setattr(self.parent, self.name, module)


def linear_slots(model: nn.Module) -> Iterator[LinearSlot]:
    """All of them; a linear that stands in two places comes twice."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                yield LinearSlot(parent, name, child)
