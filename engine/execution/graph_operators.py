"""What a compiled layer calls without looking into it: attention, and products with packed weights.

Law: a graph names such a function by a number, which it reads from a tensor of its module: layers that are
alike then share one graph. A function lives as long as the module that holds its number. Knows neither how
attention is computed nor how a layer is compiled.

The operators stand in torch's registry, which is one for the process.
"""

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

BUFFER = "graph_number"
"""The tensor's name in a module."""


class _Function:
    """Held by a module, so that it can be forgotten with it."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        self.call = call


_functions: WeakValueDictionary[int, _Function] = WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library("tokenmill", "DEF")  # type: ignore[no-untyped-call]  # torch types it not


def give_number(module: nn.Module, call: Callable[..., torch.Tensor]) -> None:
    """Let graphs call `call` where they read the number of `module`. Of one module the last call holds."""
    number, function = next(_numbers), _Function(call)
    _functions[number] = function
    module.graph_function = function  # type: ignore[assignment]  # modules type every attribute
    # On the host wherever the model is: reading it makes no device wait.
    module.register_buffer(BUFFER, torch.tensor(number), persistent=False)


def product(hidden: torch.Tensor, number: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """`hidden` [..., in] -> [..., num_outputs], by the function of that number."""
    result: torch.Tensor = torch.ops.tokenmill.product(hidden, number, num_outputs)
    return result


class GraphStep:
    """Stands for the step of a forward in the layers of a model that is compiled.

    `num_uncompiled`: layers that ran without a graph.
    """

    def __init__(self) -> None:
        self.num_uncompiled = 0

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `AttentionStep.attend`, but that the module's function knows which layer it is."""
        if not torch.compiler.is_compiling():
            self.num_uncompiled += 1
        result: torch.Tensor = torch.ops.tokenmill.attend(
            query, key, value, sinks, getattr(module, BUFFER), scaling, sliding_window or 0, softcap or 0.0
        )
        return result


def _product(hidden: torch.Tensor, number: torch.Tensor, num_outputs: int) -> torch.Tensor:
    del num_outputs  # The weight says so too; this is for whoever looks at shapes alone.
    return _functions[int(number)].call(hidden)


def _product_shape(hidden: torch.Tensor, number: torch.Tensor, num_outputs: int) -> torch.Tensor:
    del number
    return hidden.new_empty(*hidden.shape[:-1], num_outputs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    number: torch.Tensor,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    call = _functions[int(number)].call
    return call(query, key, value, sinks, scaling, window or None, softcap or None).contiguous()


def _attend_shape(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    del key
    return query.new_empty(*query.shape[:2], value.shape[-1])


def _define(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> None:
    _library.define(schema)  # type: ignore[no-untyped-call]  # torch types it not
    name = schema.partition("(")[0]
    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)  # type: ignore[no-untyped-call]  # torch types it not
    torch.library.register_fake(f"tokenmill::{name}", shape, lib=_library)


_define("product(Tensor hidden, Tensor number, SymInt num_outputs) -> Tensor", _product, _product_shape)
_define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor number, float scaling, int window,"
    " float softcap) -> Tensor",
    _attend,
    _attend_shape,
)
