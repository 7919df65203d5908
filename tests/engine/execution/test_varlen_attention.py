"""What torch's `varlen_attn` is asked, by a stand-in that computes on a CPU what its documentation says.

The kernel itself runs on CUDA alone, where the trial of a model checks it.
"""

from typing import Any

import pytest
import torch

from engine.errors import UnsupportedModel
from engine.execution import varlen_attention
from engine.execution.attention import LayerSpec, PoolShape
from engine.execution.varlen_attention import VarlenAttention, find_varlen_attn, refusal
from tests.engine.execution.attention_bench import TOLERANCE, Bench
from tests.engine.execution.pools import cpu_shape

CUDA = torch.device("cuda")
LONGEST = 600
# A chunk between singles, singles behind a chunk, singles alone; the second block of 256 begins.
STEPS = (
    ((0, 0, 1), (1, 0, 300), (2, 0, 1), (3, 0, 5)),
    ((1, 300, 520), (0, 1, 2), (3, 5, 6)),
    ((3, 6, 7), (1, 520, 521), (0, 2, 3)),
)


def stand_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    assert {one.dtype for one in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert (cu_seq_k, enable_gqa, num_splits, window_size[1]) == (None, True, 1, 0)
    out = torch.full_like(query, torch.nan)
    for at, length in enumerate(seqused_k.tolist()):
        begin, end = cu_seq_q[at : at + 2].tolist()
        assert end - begin <= max_q
        assert length <= max_k
        keys, values = (
            pool[block_table[at].long()].flatten(0, 1)[:length].float().transpose(0, 1)
            for pool in (key, value)
        )
        beside = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
        seen = beside >= 0
        if window_size[0] >= 0:
            seen &= beside <= window_size[0]
        out[begin:end] = torch.nn.functional.scaled_dot_product_attention(
            query[begin:end].float().transpose(0, 1),
            keys,
            values,
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        ).transpose(0, 1)
    return out


@pytest.mark.parametrize("window", [None, 1, 270])
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_what_torch_is_asked(window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "find_varlen_attn", lambda: stand_in)
    monkeypatch.setattr(varlen_attention, "refusal", lambda *_: None)
    bench = Bench(LayerSpec(6, 2, 16, 16, 0.3, window), 256, dtype, LONGEST)
    backend = VarlenAttention(cpu_shape((bench.spec,), bench.num_blocks, 256, dtype))
    for pool in (*backend.pool.keys, *backend.pool.values):
        pool[1:] = torch.nan
    ours, theirs = (bench.run(one, STEPS) for one in (backend, bench.backend("torch")))
    most = TOLERANCE[dtype]
    torch.testing.assert_close(
        torch.stack(list(ours.values())), torch.stack(list(theirs.values())), rtol=most, atol=most
    )


def test_this_torch_has_what_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find_varlen_attn.cache_clear()
    assert callable(find_varlen_attn())
    find_varlen_attn.cache_clear()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, block_table, scale: query)
    with pytest.raises(ImportError, match="has no enable_gqa, num_splits, seqused_k, window_size"):
        find_varlen_attn()


PLAIN: dict[str, Any] = {
    "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "scaling": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "block_size", "dtype", "device", "reason"),
    [
        ({"softcap": 30.0}, 256, torch.bfloat16, "cuda", "a soft cap"),
        ({"sinks": True}, 256, torch.bfloat16, "cuda", "sinks"),
        ({"value_dim": 32}, 256, torch.bfloat16, "cuda", "values of another size than keys"),
        ({"head_dim": 512, "value_dim": 512}, 256, torch.bfloat16, "cuda", "heads of 512 numbers"),
        ({"head_dim": 12, "value_dim": 12}, 256, torch.bfloat16, "cuda", "heads of 12 numbers"),
        ({"num_heads": 3}, 256, torch.bfloat16, "cuda", "3 heads that share 2 KV heads"),
        ({}, 16, torch.bfloat16, "cuda", "blocks of 16 tokens, only multiples of 256"),
        ({}, 256, torch.float32, "cuda", "the dtype torch.float32"),
        ({}, 256, torch.bfloat16, "cpu", "the device cpu"),
    ],
)
def test_what_it_does_not_take_is_said(
    fields: dict[str, Any], block_size: int, dtype: torch.dtype, device: str, reason: str
) -> None:
    spec = LayerSpec(**{**PLAIN, **fields})
    windowed = LayerSpec(**PLAIN, sliding_window=5)
    assert refusal(PoolShape((windowed,), 4, 512, torch.float16, CUDA)) is None
    shape = PoolShape((LayerSpec(**PLAIN), spec), 4, block_size, dtype, torch.device(device))
    assert refusal(shape) == reason


def test_a_refusal_is_raised() -> None:
    with pytest.raises(UnsupportedModel, match="varlen_attn does not take the device cpu"):
        VarlenAttention(cpu_shape((LayerSpec(**PLAIN),), 2, 256, torch.bfloat16))
