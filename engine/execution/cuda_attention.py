"""Which backends may compute attention on CUDA, in the order in which they are tried.

Law: with "auto" the fallback comes last and is always there; it is said once why the fastest is missing. One
that was asked for by name is taken or refused. This file does not know models.
"""

import logging
from functools import partial

import torch

from engine.errors import InvalidParameter
from engine.execution.attention_self_check import check_attention
from engine.execution.kv_pool import KVPool
from engine.execution.trial import Backend, Terms
from engine.execution.varlen_attention import BLOCK_TOKENS, DTYPES, VarlenAttention, find_varlen_attn

log = logging.getLogger(__name__)

CUDA_ATTENTION = ("triton", "varlen")
"""Names; Triton's kernels first, as they take every model and every size of block."""


class WrongBlocks(Exception):
    """A backend cannot read blocks of the size that was set."""


def cuda_backends(attention: str, block_size: int, fallback: Backend) -> tuple[Backend, ...]:
    """`attention`: one of `CUDA_ATTENTION`, or "auto": those that can be had, then `fallback`.

    Raises `InvalidParameter` if the one that is named cannot be had.
    """
    found = []
    for name in CUDA_ATTENTION if attention == "auto" else (attention,):
        try:
            found.append(_triton() if name == "triton" else _varlen(block_size))
        except (ImportError, WrongBlocks) as error:
            if attention != "auto":
                raise InvalidParameter("attention", f"{name} cannot be had: {error}") from error
            if name == "triton":
                log.warning("attention is not computed by Triton's kernels, which are fastest: %s", error)
    return (*found, fallback) if attention == "auto" else tuple(found)


def _triton() -> Backend:
    """Raises `ImportError`. Only here, as a torch for CPUs comes without Triton."""
    from engine.execution.triton_attention import TritonAttention

    self_check = partial(check_attention, TritonAttention)
    return Backend("triton", TritonAttention, KVPool.bytes_per_block, self_check=self_check)


def _varlen(block_size: int) -> Backend:
    """Raises `ImportError`, or `WrongBlocks`."""
    find_varlen_attn()
    if block_size % BLOCK_TOKENS:
        raise WrongBlocks(f"it reads blocks of multiples of {BLOCK_TOKENS} tokens, not of {block_size}")
    # Half precision with the most digits: what is left out still shows.
    terms = Terms(torch.float16, BLOCK_TOKENS, largest_difference=2e-2)
    return Backend("varlen", VarlenAttention, KVPool.bytes_per_block, terms, DTYPES)
