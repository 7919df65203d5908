"""Rotary position embeddings are computed by the native operator, where a model's own function is seen to be
what the operator computes.

Law: nothing changes but the time: the operator gives the function's own outputs to the last bit, and with it
the model's attention is given what it was given before, or the change is taken back. Only this model's
modules see the operator; the module of transformers that defines the function stays as it is.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.execution.attention.probe import SeenCall, pass_of_two_tokens
from engine.execution.layers.rotary_operator import RotaryOperator
from engine.execution.machine.native_library import DTYPES

FUNCTION = "apply_rotary_pos_emb"
"""Under which name the modules of transformers look their function up."""
SIZES = (8, 64)
"""Of heads that are tried: less than a vector, and many."""
NUM_ROWS = 3

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FastRotary:
    """Stands for `plain`; what the operator does not take, `plain` computes."""

    def __init__(self, operator: RotaryOperator, plain: Rotate) -> None:
        self._operator = operator
        self._plain = plain

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        *others: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = None if others or named else self._operator.rotate(query, key, cosine, sine)
        return self._plain(query, key, cosine, sine, *others, **named) if rotated is None else rotated


class _Place(NamedTuple):
    """A module whose `forward`, without its decorators, looks `plain` up."""

    module: nn.Module
    forward: FunctionType
    plain: Rotate


def use_native_rotary(model: PreTrainedModel, operator: RotaryOperator, before: list[SeenCall]) -> int:
    """Let the modules that rotate use the operator; gives how many.

    `before`: what a pass of the model as it is has shown.
    """
    places = [place for place in map(_place, model.modules()) if place is not None]
    plains = {place.plain for place in places}
    known = {plain: FastRotary(operator, plain) for plain in plains if _is_the_same(plain, operator)}
    places = [place for place in places if place.plain in known]
    if not places:
        return 0
    for module, forward, plain in places:
        module.forward = MethodType(_looking_up(forward, known[plain]), module)
    if all(map(torch.equal, _given(before), _given(pass_of_two_tokens(model)))):
        return len(places)
    for place in places:
        # What the class has is seen again.
        del place.module.forward
    return 0


def _place(module: nn.Module) -> _Place | None:
    if "forward" in vars(module):
        return None
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or FUNCTION not in forward.__code__.co_names:
        return None
    plain = forward.__globals__.get(FUNCTION)
    return _Place(module, forward, plain) if isinstance(plain, FunctionType) else None


def _looking_up(forward: FunctionType, rotate: Rotate) -> FunctionType:
    """The same function, which finds `rotate` under the name."""
    known = {**forward.__globals__, FUNCTION: rotate}
    copy = FunctionType(forward.__code__, known, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _is_the_same(plain: Rotate, operator: RotaryOperator) -> bool:
    """On random heads, in all dtypes."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        for size in SIZES:
            query = torch.randn(1, 4, NUM_ROWS, size, generator=generator).to(dtype)
            key = torch.randn(1, 2, NUM_ROWS, size, generator=generator).to(dtype)
            # Not cosines and sines of one angle: what reads another half than we do shows.
            cosine, sine = torch.randn(2, 1, NUM_ROWS, size, generator=generator).to(dtype)
            ours = operator.rotate(query, key, cosine, sine)
            try:
                theirs = plain(query.clone(), key.clone(), cosine, sine)
            except (IndexError, RuntimeError, TypeError, ValueError):
                # One that wants angles of another shape.
                return False
            if ours is None or len(theirs) != len(ours) or not all(map(torch.equal, ours, theirs)):
                return False
    return True


def _given(calls: list[SeenCall]) -> Iterator[torch.Tensor]:
    """The queries and keys of all layers."""
    return (tensor for call in calls for tensor in (call.query, call.key))
