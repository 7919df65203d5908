"""Which backends may compute attention on CUDA, in the order in which they are tried.

Law: with "auto" the fallback comes last and is always there; a warning says why Triton's kernels are missing.
One that was asked for by name is taken or refused. This file does not know models.
"""

import logging
from functools import partial

from engine.errors import InvalidParameter
from engine.execution.attention.interface import Backend
from engine.execution.attention.kv_pool import KVPool
from engine.execution.loading.attention_self_check import check_attention

log = logging.getLogger(__name__)


def cuda_backends(attention: str, fallback: Backend) -> tuple[Backend, ...]:
    """`attention`: "triton", or "auto": Triton's kernels if they can be imported, then `fallback`.

    Raises `InvalidParameter` if "triton" cannot be had.
    """
    try:
        triton = _triton()
    except ImportError as error:
        if attention != "auto":
            raise InvalidParameter("attention", f"{attention} cannot be had: {error}") from error
        log.warning("attention is not computed by Triton's kernels, which are fastest: %s", error)
        return (fallback,)
    return (triton, fallback) if attention == "auto" else (triton,)


def _triton() -> Backend:
    """Raises `ImportError`. Only here, as a torch for CPUs comes without Triton."""
    from engine.execution.attention.triton_backend import TritonAttention

    self_check = partial(check_attention, TritonAttention)
    return Backend("triton", TritonAttention, KVPool.bytes_per_block, self_check=self_check)
