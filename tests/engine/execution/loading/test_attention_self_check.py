"""The self-check of GPU attention accepts correct kernels and detects faults."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.execution.attention.interface import AttentionBatch, Backend, LayerSpec, PoolShape
from engine.execution.attention.torch_backend import TorchAttention, TorchMetadata
from engine.execution.attention.triton_backend import TritonAttention
from engine.execution.loading.attention_backends import TORCH, triton_backend
from engine.execution.loading.attention_self_check import check_attention, with_checked_attention
from engine.execution.loading.loader import load_model

PLAIN = LayerSpec(4, 2, 32, 32, 0.2)
ALL = LayerSpec(4, 1, 32, 48, 0.2, sliding_window=300, softcap=20.0, sinks=True)


def shape(spec: LayerSpec, dtype: torch.dtype = torch.bfloat16, block_size: int = 16) -> PoolShape:
    return PoolShape((spec,), 1, block_size, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("spec", "dtype", "block_size"),
    [(PLAIN, torch.bfloat16, 16), (ALL, torch.float16, 32), (ALL, torch.float32, 16)],
)
def test_the_kernels_pass(spec: LayerSpec, dtype: torch.dtype, block_size: int) -> None:
    check_attention(TritonAttention, shape(spec, dtype, block_size))


def change_batch(batch: AttentionBatch, fault: str) -> AttentionBatch:
    tables, lengths, chunks = batch.decode_tables.clone(), batch.decode_lengths.clone(), batch.chunks
    if fault == "a block is taken for another":
        tables[-1, 7] = tables[-1, 8]
    elif fault == "the last tile of keys is left out":
        lengths[-1] -= 16
    elif fault == "the first split is left out":
        tables[-1, :16] = 0
    elif fault == "one token too many is seen":
        lengths[1] += 1
    elif fault == "the chunk's other tokens are left out":
        first, last = chunks
        chunks = (first, last._replace(table=torch.zeros_like(last.table)))
    return replace(batch, decode_tables=tables, decode_lengths=lengths, chunks=chunks)


class Faulty(TorchAttention):
    """Correct except for one fault."""

    def __init__(self, fault: str, shape: PoolShape) -> None:
        super().__init__(shape)
        self._fault = fault

    def build_metadata(self, batch: AttentionBatch) -> TorchMetadata:
        return super().build_metadata(change_batch(batch, self._fault))


@pytest.mark.parametrize(
    "fault",
    [
        "a block is taken for another",
        "the last tile of keys is left out",
        "the first split is left out",
        "one token too many is seen",
        "the chunk's other tokens are left out",
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fault_is_detected(fault: str, dtype: torch.dtype) -> None:
    check_attention(partial(Faulty, "none"), shape(PLAIN, dtype))
    with pytest.raises(UnsupportedModel, match=r"disagrees with torch's by .* with blocks of 16 tokens"):
        check_attention(partial(Faulty, fault), shape(PLAIN, dtype))


def test_errors_of_a_compiler_are_reported() -> None:
    def broken(_: PoolShape) -> TorchAttention:
        raise RuntimeError("out of shared memory")

    with pytest.raises(UnsupportedModel, match="self-check failed: RuntimeError: out of shared memory"):
        check_attention(broken, shape(PLAIN))


def refuse(seen: list[PoolShape]) -> Callable[[PoolShape], None]:
    def self_check(shape: PoolShape) -> None:
        seen.append(shape)
        raise UnsupportedModel("it is wrong")

    return self_check


def test_attention_that_fails_is_replaced_or_refused(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the served dtype and block size. A backend requested by name has no fallback."""
    seen: list[PoolShape] = []
    wrong = Backend("wrong", TorchAttention, TORCH.bytes_per_block, self_check=refuse(seen))
    loaded = load_model(
        str(tiny_llama),
        backends=(wrong, TORCH),
        dtype="bfloat16",
        device="cpu",
        progress=lambda _: None,
    )
    assert loaded.backend is wrong
    with caplog.at_level(logging.WARNING):
        assert with_checked_attention(loaded, (wrong, TORCH), 32).backend is TORCH
    assert "wrong attention is not used: it is wrong" in caplog.text
    with pytest.raises(UnsupportedModel, match="wrong attention: it is wrong"):
        with_checked_attention(loaded, (wrong,), 32)
    assert {(one.dtype, one.block_size, len(one.layers)) for one in seen} == {(torch.bfloat16, 32, 1)}


def test_the_kernels_of_a_gpu_are_checked() -> None:
    triton = triton_backend()
    assert triton.self_check is not None
    triton.self_check(shape(PLAIN))
    with pytest.raises(UnsupportedModel):
        triton.self_check(shape(PLAIN, torch.float64))
