"""Chooses the attention backends for a device, in the order in which they are tried.

With "auto", torch's backend is always the last one; a warning says why a faster one is missing. A backend
that is requested by name is used or refused, never replaced.
"""

import logging
from functools import partial

import torch

from engine.errors import InvalidParameter
from engine.execution.attention.interface import Backend
from engine.execution.attention.kv_pool import KVPool
from engine.execution.attention.native_backend import AttentionOperator, NativeAttention, bytes_per_block
from engine.execution.attention.native_self_check import check_operator
from engine.execution.attention.torch_backend import TorchAttention
from engine.execution.loading.attention_self_check import check_attention
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary

log = logging.getLogger(__name__)

ATTENTION = ("auto", "torch", "native", "triton")
DEVICES = {"native": "cpu", "triton": "cuda"}
"""The only type of device on which each backend runs."""
TORCH = Backend("torch", TorchAttention, KVPool.bytes_per_block)


def choose_backends(
    attention: str,
    *,
    deterministic: bool,
    device: torch.device,
    library: NativeLibrary | CannotBuild,
) -> tuple[Backend, ...]:
    """`attention`: one of `ATTENTION`. `library`: the native operators, or why there are none.

    The result is not used in deterministic mode, which has its own backend. Raises `InvalidParameter` for a
    backend that is not available.
    """
    if attention not in ATTENTION:
        raise InvalidParameter("attention", f"must be {', '.join(ATTENTION)}, not {attention!r}")
    if attention in DEVICES and deterministic:
        raise InvalidParameter("attention", "deterministic mode has its own attention; use auto")
    if (required := DEVICES.get(attention, device.type)) != device.type:
        raise InvalidParameter("attention", f"{attention} runs on {required}, not on {device.type}; use auto")
    if attention == "torch" or deterministic:
        return (TORCH,)
    try:
        fast = triton_backend() if device.type == "cuda" else native_backend(library)
    except (ImportError, CannotBuild) as error:
        if attention != "auto":
            raise InvalidParameter("attention", f"{attention} is not available: {error}") from error
        log.warning("attention is computed by torch, which is slower: %s", error)
        return (TORCH,)
    return (fast, TORCH) if attention == "auto" else (fast,)


def native_backend(library: NativeLibrary | CannotBuild) -> Backend:
    """The native operator, after its self-check. Raises `CannotBuild`."""
    if isinstance(library, CannotBuild):
        raise library
    operator = AttentionOperator(library)
    check_operator(operator)
    return Backend("native", partial(NativeAttention, operator), partial(bytes_per_block, operator))


def triton_backend() -> Backend:
    """Triton's kernels. Raises `ImportError`: torch for CPUs comes without Triton."""
    from engine.execution.attention.triton_backend import TritonAttention

    self_check = partial(check_attention, TritonAttention)
    return Backend("triton", TritonAttention, KVPool.bytes_per_block, self_check=self_check)
