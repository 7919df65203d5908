"""Which backends may compute a plain model's attention, in the order in which they are tried.

Law: torch's is always there, so "auto" never fails for want of a faster one; it says once why it has none.
A backend that somebody asked for by name is taken or refused, never replaced. This file does not know models.
"""

import logging
from functools import partial

import torch

from engine.errors import InvalidParameter
from engine.execution.attention.interface import Backend
from engine.execution.attention.kv_pool import KVPool
from engine.execution.attention.native_backend import NativeAttention, bytes_per_block
from engine.execution.attention.native_operator import AttentionOperator
from engine.execution.attention.native_self_check import check_operator
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.loading.cuda_backends import cuda_backends
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary

log = logging.getLogger(__name__)

ATTENTION = ("auto", "torch", "native", "triton")
DEVICES = {"native": "cpu", "triton": "cuda"}
"""The only type of device on which each runs."""
TORCH = Backend("torch", TorchAttention, KVPool.bytes_per_block)


def choose_backends(
    attention: str,
    *,
    deterministic: bool,
    device: torch.device,
    library: NativeLibrary | CannotBuild,
) -> tuple[Backend, ...]:
    """`attention`: one of `ATTENTION`; `library`: the native operators, or why there are none.

    Raises `InvalidParameter` for what cannot be had.

    With `deterministic` there is nothing to choose, and torch's stands for what is not used.
    """
    if attention not in ATTENTION:
        raise InvalidParameter("attention", f"must be {', '.join(ATTENTION)}, not {attention!r}")
    if attention in DEVICES and deterministic:
        raise InvalidParameter("attention", "deterministic numerics have their own; use auto")
    if (wanted := DEVICES.get(attention, device.type)) != device.type:
        raise InvalidParameter("attention", f"{attention} runs on {wanted}, not on {device.type}; use auto")
    if attention == "torch" or deterministic:
        return (TORCH,)
    if device.type == "cuda":
        return cuda_backends(attention, TORCH)
    try:
        native = native_backend(library)
    except CannotBuild as error:
        if attention == "native":
            raise InvalidParameter("attention", f"native cannot be had: {error}") from error
        log.warning("attention is computed by torch, which is slower than the native operator: %s", error)
        return (TORCH,)
    return (native,) if attention == "native" else (native, TORCH)


def native_backend(library: NativeLibrary | CannotBuild) -> Backend:
    """The native operator, tried. Raises `CannotBuild`."""
    if isinstance(library, CannotBuild):
        raise library
    operator = AttentionOperator(library)
    check_operator(operator)
    return Backend("native", partial(NativeAttention, operator), partial(bytes_per_block, operator))
