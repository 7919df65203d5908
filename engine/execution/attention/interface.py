"""The seam between a model of transformers and whatever computes attention for it.

Law: every attention layer of a served model calls `paged_attention` exactly once per forward, and that call
goes to the step that came with this forward as a keyword argument; nothing is kept between forwards. This
file does not know how keys and values are stored: that is the backend's alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from transformers import AttentionInterface

from engine.errors import UnsupportedModel

ATTENTION_NAME = "tokenmill_paged"
"""The name under which transformers knows `paged_attention`."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer asks of a backend, as the load-time probe saw it.

    `head_dim` is the size of a query or key, `value_dim` that of a value. `sliding_window`: how many tokens
    a query sees, itself included; None sees all. `softcap`: scores become `softcap * tanh(score / softcap)`.
    `sinks`: each head has one more score that takes weight and gives no value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def kv_size(self) -> int:
        """Numbers that one token keeps in this layer."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


class PoolShape(NamedTuple):
    """What a backend's KV pool is to hold: keys and values of `dtype` on `device`, for each of `layers`.

    `num_blocks`: blocks of `block_size` tokens, block 0 included, which belongs to nobody.
    """

    layers: tuple[LayerSpec, ...]
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


class LayerCall(NamedTuple):
    """What a layer says beside its tensors. `sinks`: [num_heads], or None."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionMetadata(Protocol):
    """One forward's attention."""

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the new keys and values, and attend to all that their sequences have.

        `query` [tokens, num_heads, head_dim], `key` [tokens, num_kv_heads, head_dim], `value` [tokens,
        num_kv_heads, value_dim], positions already applied. Returns [tokens, num_heads, value_dim].
        """
        ...


class Chunk(NamedTuple):
    """Rows `first_row` to `first_row + num_rows` of a batch: positions `start` and on of one sequence.

    `table` [blocks]: the KV blocks that hold the sequence up to the chunk's last token.
    """

    first_row: int
    num_rows: int
    start: int
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the rows of one flat batch belong in the pool.

    All tensors are int64 and on the host: a backend plans with them, and takes from `on` what its kernels
    read. `slot_mapping` [tokens]: where each row's key and value go, counted as block * block_size + offset.
    `blocks_begun`: blocks whose first token this batch writes and whose last it does not. `decode_rows`
    [singles]: rows of sequences that compute one token; `decode_lengths`: tokens each has, the new one
    included; `decode_tables` [singles, blocks]: their KV blocks, filled up with the null block 0. `chunks`:
    all other rows. `moved`: the same on the device, where the runner has moved it.
    """

    slot_mapping: torch.Tensor
    blocks_begun: torch.Tensor
    decode_rows: torch.Tensor
    decode_lengths: torch.Tensor
    decode_tables: torch.Tensor
    chunks: tuple[Chunk, ...]
    moved: "AttentionBatch | None" = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them, in the order in which `with_tensors` takes them."""
        singles = [self.decode_rows, self.decode_lengths, self.decode_tables]
        return [self.slot_mapping, self.blocks_begun, *singles, *(chunk.table for chunk in self.chunks)]

    def with_tensors(self, tensors: list[torch.Tensor]) -> "AttentionBatch":
        """The same batch in other tensors: one for each of `tensors`."""
        slots, blocks_begun, decode_rows, decode_lengths, decode_tables, *tables = tensors
        chunks = (chunk._replace(table=table) for chunk, table in zip(self.chunks, tables, strict=True))
        return AttentionBatch(slots, blocks_begun, decode_rows, decode_lengths, decode_tables, tuple(chunks))

    def on(self, device: torch.device) -> "AttentionBatch":
        """The same with its tensors on `device`; without a copy where the runner has moved them."""
        if device.type == "cpu":
            return self
        if self.moved is not None:
            return self.moved
        return self.with_tensors([tensor.to(device) for tensor in self.tensors])


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A batch of nothing but single tokens, in tensors of the device that stay where they are.

    All int64. `slot_mapping` [rows]: where each row's key and value go; `lengths` [rows]: tokens that its
    sequence has, the new one included; `tables` [rows, blocks]: its KV blocks, as wide as the longest
    sequence allowed. Behind a row's last block a table may name any block. Rows of nobody fill the batch up:
    slot 0, length 1, a table that begins with the null block 0.
    """

    slot_mapping: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


class AttentionBackend(Protocol):
    """Owns the KV pool, whose layout is its own: see `PoolShape`."""

    def build_metadata(self, batch: AttentionBatch) -> AttentionMetadata:
        """Prepare one forward. May be called again for the same rows after a failure."""
        ...

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        """Forget what these blocks hold."""
        ...


@runtime_checkable
class GraphableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured once and replayed with other contents."""

    def build_decode_metadata(self, rows: DecodeRows) -> AttentionMetadata:
        """Prepare one forward of `rows`, whatever they hold at the time when the device computes it.

        This call and the step's `attend` are captured: they launch work for the device and nothing else. They
        read nothing back, and what they launch depends on the shapes alone. No slot at or behind a row's
        length is read, in this step or in any later one: the null block and blocks just begun hold anything.
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    attention_metadata: AttentionMetadata | None = None,
    **_ignored: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: `query`, `key`, `value` are [1, heads, tokens, size].

    Returns the output [1, tokens, heads, value_dim] and no weights. Raises `UnsupportedModel` for a call that
    asks for something other than plain causal attention.
    """
    if attention_metadata is None:
        raise UnsupportedModel("the model does not hand keyword arguments on to its attention layers")
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedModel("the model adds a mask or a bias of its own to its attention scores")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel("the model has attention that is not causal")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    heads_last = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    call = LayerCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]  # modules type every attribute as a tensor
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attention_metadata.forward(call, *heads_last).unsqueeze(0), None


def install() -> None:
    """Make `ATTENTION_NAME` known to transformers, whose registry is one for the process. Repeatable."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


BackendFactory = Callable[[PoolShape], AttentionBackend]
"""Raises `UnsupportedModel` for a shape that it does not take."""


class Backend(NamedTuple):
    """A way to attend. `bytes_per_block`: for layers, block size and dtype, what one takes in all layers.

    `self_check`: raises `UnsupportedModel` if it is wrong in the one layer of a shape, in the dtype and block
    size that it serves.
    """

    name: str
    make: BackendFactory
    bytes_per_block: Callable[[tuple[LayerSpec, ...], int, torch.dtype], int]
    self_check: Callable[[PoolShape], None] | None = None
