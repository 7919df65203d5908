"""Replaces a model's rotary embedding function with the native operator.

The function is replaced only if the operator returns its outputs bit for bit and the model's attention then
reads the same queries and keys. Only this model's modules change.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.execution.attention.probe import SeenCall, pass_of_two_tokens
from engine.execution.layers.elementwise_operator import ElementwiseOperator
from engine.execution.machine.native_library import DTYPES
from engine.execution.machine.self_check import seeded_randn

FUNCTION = "apply_rotary_pos_emb"
"""The global name under which the modeling files of transformers call the function."""
SIZES = (8, 64)
"""Head sizes that are compared: less than a vector, and several vectors."""
NUM_ROWS = 3

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class NativeRotary:
    """Replaces `plain`, which still computes what the operator does not support."""

    def __init__(self, operator: ElementwiseOperator, plain: Rotate) -> None:
        self._operator = operator
        self._plain = plain

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated = None if args or kwargs else self._operator.rotate(query, key, cosine, sine)
        return self._plain(query, key, cosine, sine, *args, **kwargs) if rotated is None else rotated


class _Caller(NamedTuple):
    """A module whose undecorated `forward` calls `plain`."""

    module: nn.Module
    forward: FunctionType
    plain: Rotate


def use_native_rotary(model: PreTrainedModel, operator: ElementwiseOperator, before: list[SeenCall]) -> int:
    """Replace the rotary function in the modules that call it. Returns their number.

    `before`: the attention calls of the unchanged model.
    """
    callers = [caller for caller in map(_caller, model.modules()) if caller is not None]
    plains = {caller.plain for caller in callers}
    native = {plain: NativeRotary(operator, plain) for plain in plains if _agrees(plain, operator)}
    callers = [caller for caller in callers if caller.plain in native]
    if not callers:
        return 0
    for module, forward, plain in callers:
        module.forward = MethodType(_with_rotary(forward, native[plain]), module)
    if all(map(torch.equal, _queries_and_keys(before), _queries_and_keys(pass_of_two_tokens(model)))):
        return len(callers)
    for caller in callers:
        # Uncovers the class's method.
        del caller.module.forward
    return 0


def _caller(module: nn.Module) -> _Caller | None:
    if "forward" in vars(module):
        return None
    forward = inspect.unwrap(type(module).forward)
    if not isinstance(forward, FunctionType) or FUNCTION not in forward.__code__.co_names:
        return None
    plain = forward.__globals__.get(FUNCTION)
    return _Caller(module, forward, plain) if isinstance(plain, FunctionType) else None


def _with_rotary(forward: FunctionType, rotate: Rotate) -> FunctionType:
    """A copy of `forward` whose globals name `rotate`.

    The modeling files call a module-level function and offer no hook for it. Replacing it in the transformers
    module would change every model in the process, including the reference of the agreement check.
    """
    namespace = {**forward.__globals__, FUNCTION: rotate}
    copy = FunctionType(
        forward.__code__, namespace, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _agrees(plain: Rotate, operator: ElementwiseOperator) -> bool:
    """Whether the operator returns the bits of `plain` on random heads in all dtypes."""
    randn = seeded_randn()
    for dtype in DTYPES:
        for size in SIZES:
            query, key = randn(1, 4, NUM_ROWS, size, dtype=dtype), randn(1, 2, NUM_ROWS, size, dtype=dtype)
            # Independent values: a function that reads only one half of the cosines or sines differs.
            cosine, sine = randn(2, 1, NUM_ROWS, size, dtype=dtype)
            found = operator.rotate(query, key, cosine, sine)
            try:
                expected = plain(query.clone(), key.clone(), cosine, sine)
            except (IndexError, RuntimeError, TypeError, ValueError):
                # It reads angles of another shape.
                return False
            if found is None or len(expected) != len(found) or not all(map(torch.equal, found, expected)):
                return False
    return True


def _queries_and_keys(calls: list[SeenCall]) -> Iterator[torch.Tensor]:
    return (tensor for call in calls for tensor in (call.query, call.key))
