"""Paged attention on CUDA by torch's own `varlen_attn`, FlashAttention over a table of blocks.

Law: as for every backend, a row sees the tokens of its own sequence up to itself and nothing else, and a
batch may be computed again after a failure. It serves plain and windowed attention in half precision with
large blocks, and refuses all else. Keys are not split among programs, as how many splits there are would
follow from what else is computed. torch's kernel masks what lies beyond a sequence's end before it
multiplies, so no block is zeroed when it is begun.
"""

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch

from engine.errors import UnsupportedModel
from engine.execution.attention import AttentionBatch, LayerCall, LayerSpec, PoolShape
from engine.execution.kv_pool import KVPool

DTYPES = (torch.float16, torch.bfloat16)
BLOCK_TOKENS = 256
"""Blocks must be a multiple of this: FlashAttention 2, which torch carries, reads no smaller pages."""
MOST_SIZE = 256
"""The largest head that it takes."""
NEEDED = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}


class VarlenAttention:
    """A KV pool of `shape`, and attention over it.

    Raises `UnsupportedModel` for what torch's kernel does not take.
    """

    def __init__(self, shape: PoolShape) -> None:
        if reason := refusal(shape):
            raise UnsupportedModel(f"torch's varlen_attn does not take {reason}")
        self.pool = KVPool(shape)

    def begin(self, batch: AttentionBatch) -> "VarlenStep":
        return VarlenStep(self.pool, batch)

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        self.pool.zero_blocks(blocks)


@cache
def find_varlen_attn() -> Any:
    """Raises `ImportError` if this torch has none that reads a table of blocks."""
    # Here, and not above: not every torch that is served with has it.
    from torch.nn.attention.varlen import varlen_attn

    if missing := NEEDED - inspect.signature(varlen_attn).parameters.keys():
        raise ImportError(f"the varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}")
    return varlen_attn


def refusal(shape: PoolShape) -> str | None:
    """What of this it does not take; None if it takes all."""
    if shape.device.type != "cuda":
        return f"the device {shape.device}"
    if shape.dtype not in DTYPES:
        return f"the dtype {shape.dtype}"
    if shape.block_size % BLOCK_TOKENS:
        return f"blocks of {shape.block_size} tokens, only multiples of {BLOCK_TOKENS}"
    return next((reason for spec in shape.layers if (reason := _refusal(spec))), None)


def _refusal(spec: LayerSpec) -> str | None:
    if spec.softcap is not None:
        return "a soft cap"
    if spec.sinks:
        return "sinks"
    if spec.head_dim != spec.value_dim:
        return "values of another size than keys"
    if spec.head_dim > MOST_SIZE or spec.head_dim % 8:
        return f"heads of {spec.head_dim} numbers"
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} heads that share {spec.num_kv_heads} KV heads"
    return None


class Spans(NamedTuple):
    """The batch's sequences in the order of their rows, all int32 but the numbers.

    `begins` [sequences + 1]: where the rows of each begin, and the end; `lengths` [sequences]: tokens that
    each has; `tables` [sequences, blocks]; `most_rows`, `most_tokens`: at least those of any of them.
    """

    begins: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    most_rows: int
    most_tokens: int


class VarlenStep:
    """One forward: its sequences are written down once for all layers."""

    def __init__(self, pool: KVPool, batch: AttentionBatch) -> None:
        self._pool = pool
        self._slots = batch.on(pool.device).slots
        self._spans = spans(batch, pool.block_size)
        self._begins, self._lengths, self._tables = (tensor.to(pool.device) for tensor in self._spans[:3])

    def attend(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self._pool.store(call.layer, self._slots, key, value)
        # torch counts the tokens beside the query's own.
        window = -1 if call.sliding_window is None else call.sliding_window - 1
        out: torch.Tensor = find_varlen_attn()(
            query,
            self._pool.keys[call.layer],
            self._pool.values[call.layer],
            self._begins,
            None,
            self._spans.most_rows,
            self._spans.most_tokens,
            scale=call.scaling,
            window_size=(window, 0),
            enable_gqa=True,
            seqused_k=self._lengths,
            block_table=self._tables,
            num_splits=1,
        )
        return out


def spans(batch: AttentionBatch, block_size: int) -> Spans:
    """Where the batch's tensors are. With single rows alone nothing is asked of a device."""
    num_singles, width = batch.single_tables.shape
    if not batch.chunks:
        # They stand in their order, one row each.
        return Spans(
            torch.arange(num_singles + 1, dtype=torch.int32, device=batch.single_rows.device),
            batch.single_lengths.to(torch.int32),
            batch.single_tables.to(torch.int32),
            1,
            width * block_size,
        )
    chunks = torch.tensor([[chunk.first_row, chunk.start + chunk.num_rows] for chunk in batch.chunks])
    width = max(width, *(len(chunk.table) for chunk in batch.chunks))
    tables = torch.zeros(num_singles + len(chunks), width, dtype=torch.int32)
    tables[:num_singles, : batch.single_tables.shape[1]] = batch.single_tables
    for table, chunk in zip(tables[num_singles:], batch.chunks, strict=True):
        table[: len(chunk.table)] = chunk.table
    first_rows = torch.cat([batch.single_rows, chunks[:, 0]])
    order = first_rows.argsort()
    begins = torch.cat([first_rows[order], torch.tensor([len(batch.slots)])])
    lengths = torch.cat([batch.single_lengths, chunks[:, 1]])[order]
    most_rows = max(chunk.num_rows for chunk in batch.chunks)
    return Spans(
        begins.to(torch.int32), lengths.to(torch.int32), tables[order], most_rows, width * block_size
    )
