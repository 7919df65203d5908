"""The interface between the models of transformers and the attention backends.

Each attention layer of a model calls `paged_attention` exactly once per forward pass. The call is forwarded
to the attention metadata that the pass received as a keyword argument. How keys and values are stored is up
to the backend.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from transformers import AttentionInterface

from engine.errors import UnsupportedModel

ATTENTION_NAME = "tokenmill_paged"
"""The name of `paged_attention` in transformers' registry."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, as observed by the probe.

    `head_dim`: size of a query or key; `value_dim`: size of a value. `sliding_window`: tokens that a query
    sees, itself included; None: all. `softcap`: scores become `softcap * tanh(score / softcap)`. `sinks`:
    each head has an additional score without a value.
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
        """Elements that one token stores in this layer."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


class PoolShape(NamedTuple):
    """The size of a KV pool: keys and values of `dtype` on `device`, for each of `layers`.

    `num_blocks`: blocks of `block_size` tokens, including block 0, the null block, which no sequence owns.
    """

    layers: tuple[LayerSpec, ...]
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


class LayerCall(NamedTuple):
    """The arguments of a layer besides its tensors. `sinks`: [num_heads] or None."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionMetadata(Protocol):
    """What the layers of one forward pass need to know about its batch."""

    def forward(
        self, call: LayerCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Store the new keys and values and attend to the whole sequences.

        `query` [tokens, num_heads, head_dim], `key` [tokens, num_kv_heads, head_dim], `value` [tokens,
        num_kv_heads, value_dim], with positions applied. Returns [tokens, num_heads, value_dim].
        """
        ...


class Chunk(NamedTuple):
    """Rows `first_row` to `first_row + num_rows` of a batch: one sequence from position `start` on.

    `table` [blocks]: the sequence's KV blocks, up to the chunk's last token.
    """

    first_row: int
    num_rows: int
    start: int
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A flat batch of rows. All tensors are int64.

    `slot_mapping` [tokens]: the slot of each row's key and value, block * block_size + offset.
    `blocks_begun`: blocks whose first token this batch writes, but not their last. `decode_rows` [decodes]:
    rows of sequences that compute one token; `decode_lengths` [decodes]: tokens of each, the new one
    included; `decode_tables` [decodes, blocks]: their KV blocks, padded with the null block 0. `chunks`: all
    other rows.

    The tensors are on the host, for backends to plan with. `moved`: the same batch on the device, if the
    runner has moved it.
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
        """All tensors, in the order of `with_tensors`."""
        decodes = [self.decode_rows, self.decode_lengths, self.decode_tables]
        return [self.slot_mapping, self.blocks_begun, *decodes, *(chunk.table for chunk in self.chunks)]

    def with_tensors(self, tensors: list[torch.Tensor]) -> "AttentionBatch":
        """The same batch with copies of its tensors."""
        slots, blocks_begun, rows, lengths, decode_tables, *tables = tensors
        chunks = (chunk._replace(table=table) for chunk, table in zip(self.chunks, tables, strict=True))
        return AttentionBatch(slots, blocks_begun, rows, lengths, decode_tables, tuple(chunks))

    def on(self, device: torch.device) -> "AttentionBatch":
        """The batch with its tensors on `device`. Does not copy if the runner has moved them."""
        if device.type == "cpu":
            return self
        if self.moved is not None:
            return self.moved
        return self.with_tensors([tensor.to(device) for tensor in self.tensors])


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A batch of decode rows in device tensors with fixed addresses, for captured graphs. All int64.

    `slot_mapping` [rows]: the slot of each row's key and value; `lengths` [rows]: tokens of its sequence, the
    new one included; `tables` [rows, blocks]: its KV blocks, as wide as the longest sequence allowed. Entries
    after a row's last block are arbitrary. Padding rows have slot 0, length 1 and the null block 0.
    """

    slot_mapping: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


class AttentionBackend(Protocol):
    """Owns a KV pool and computes attention over it."""

    def build_metadata(self, batch: AttentionBatch) -> AttentionMetadata:
        """Prepare one forward pass. After a failure the same rows may be computed again."""
        ...

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        """Zero the keys and values of these blocks."""
        ...


@runtime_checkable
class GraphableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps can be captured in a graph and replayed."""

    def build_decode_metadata(self, rows: DecodeRows) -> AttentionMetadata:
        """Prepare one forward pass of `rows`, with the contents that they have when the device computes it.

        This call and `forward` of the result are captured: they only launch work, which depends on shapes
        alone, and read nothing back. No slot at or after a row's length is ever read, so the null block and
        new blocks may contain anything.
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
    """The attention function of transformers: `query`, `key` and `value` are [1, heads, tokens, size].

    Returns the output [1, tokens, heads, value_dim] and None for the weights. Raises `UnsupportedModel` for
    anything but plain causal attention.
    """
    if attention_metadata is None:
        raise UnsupportedModel("the model does not pass keyword arguments to its attention layers")
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedModel("the model adds its own mask or bias to its attention scores")
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
    """Register `ATTENTION_NAME` in transformers' global registry. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


BackendFactory = Callable[[PoolShape], AttentionBackend]
"""Raises `UnsupportedModel` for unsupported shapes."""


class Backend(NamedTuple):
    """An attention backend by name.

    `bytes_per_block`: bytes of one block in all layers, from layers, block size and dtype. `self_check`:
    raises `UnsupportedModel` if the backend computes wrongly; called with the shape of one layer, in the
    dtype and block size that are served.
    """

    name: str
    make: BackendFactory
    bytes_per_block: Callable[[tuple[LayerSpec, ...], int, torch.dtype], int]
    self_check: Callable[[PoolShape], None] | None = None


def unsupported_shape(
    shape: PoolShape, *, dtypes: Container[torch.dtype], max_head_dim: int, max_group: int | None = None
) -> str | None:
    """What of `shape` exceeds these limits, or None. `max_group`: query heads that share a KV head."""
    if shape.dtype not in dtypes:
        return f"the dtype {shape.dtype}"
    for spec in shape.layers:
        if max(spec.head_dim, spec.value_dim) > max_head_dim:
            return f"heads of more than {max_head_dim} elements"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} heads that share {spec.num_kv_heads} KV heads"
        if max_group is not None and spec.num_heads // spec.num_kv_heads > max_group:
            return f"more than {max_group} heads that share a KV head"
    return None
