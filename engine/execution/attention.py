"""The seam between a model of transformers and whatever computes attention for it.

Law: every attention layer of a served model calls `paged_attention` exactly once per forward, and that call
goes to the step that came with this forward as a keyword argument; nothing is kept between forwards. This
file does not know how keys and values are stored: that is the backend's alone.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class LayerCall(NamedTuple):
    """What a layer says beside its tensors. `sinks`: [num_heads], or None."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionStep(Protocol):
    """One forward's attention."""

    def attend(
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

    All tensors are int64 and on the host: a backend moves what it needs. `slots` [tokens]: where each row's
    key and value go, counted as block * block_size + offset. `blocks_begun`:
    blocks whose first token this batch writes and whose last it does not. `single_rows` [singles]: rows of
    sequences that compute one token; `single_lengths`: tokens each has, the new one included; `single_tables`
    [singles, blocks]: their KV blocks, filled up with the null block 0. `chunks`: all other rows.
    """

    slots: torch.Tensor
    blocks_begun: torch.Tensor
    single_rows: torch.Tensor
    single_lengths: torch.Tensor
    single_tables: torch.Tensor
    chunks: tuple[Chunk, ...]


class AttentionBackend(Protocol):
    """Owns the KV pool: `num_blocks` blocks, of which block 0 belongs to nobody."""

    def begin(self, batch: AttentionBatch) -> AttentionStep:
        """Prepare one forward. May be called again for the same rows after a failure."""
        ...

    def zero_blocks(self, blocks: tuple[int, ...]) -> None:
        """Forget what these blocks hold."""
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
    attention_step: AttentionStep | None = None,
    **_ignored: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: `query`, `key`, `value` are [1, heads, tokens, size].

    Returns the output [1, tokens, heads, value_dim] and no weights. Raises `UnsupportedModel` for a call that
    asks for something other than plain causal attention.
    """
    if attention_step is None:
        raise UnsupportedModel("the model does not hand keyword arguments on to its attention layers")
    if attention_mask is not None or position_bias is not None:
        raise UnsupportedModel("the model adds a mask or a bias of its own to its attention scores")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel("the model has attention that is not causal")
    call = LayerCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]  # modules type every attribute as a tensor
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    heads_last = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return attention_step.attend(call, *heads_last).unsqueeze(0), None


def install() -> None:
    """Make `ATTENTION_NAME` known to transformers, whose registry is one for the process. Repeatable."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
