"""A trial of each captured graph against the forward pass, with other rows than those it was captured with.

Law: a graph that has kept a value of its capture, or that sees the rows which fill a step up, is found out
before it serves anybody. This file does not know how graphs are made.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention import AttentionBackend, AttentionBatch
from engine.execution.inputs import StepInputs
from engine.execution.model_pass import run_model
from engine.execution.transfers import move_inputs

LARGEST_DIFFERENCE = {torch.float32: 1e-3}
OTHER_DIFFERENCE = 5e-2
"""Of logits, as a share of the largest: the same kernels, but perhaps another split of a long sum."""
TOKEN_STRIDE = 37


class OtherLogits(Exception):
    """A graph does not give what the forward pass gives."""


def check_graph(
    model: PreTrainedModel,
    backend: AttentionBackend,
    config: EngineConfig,
    replay: Callable[[StepInputs], torch.Tensor],
    size: int,
) -> None:
    """Raise `OtherLogits` unless both ways agree on a step of up to `size` rows.

    The step has one row less than the graph, where it has several. Its blocks are zeroed before and after.
    """
    inputs = trial_inputs(model.config.get_text_config().vocab_size, config, max(1, size - 1))
    blocks = (0, *map(int, inputs.batch.single_tables.flatten()))
    backend.zero_blocks(blocks)
    moved = move_inputs(inputs, model.device)
    step = backend.begin(moved.batch)
    right = run_model(model, moved.token_ids, moved.positions, moved.logits_rows, step).float()
    found = replay(inputs).float()
    backend.zero_blocks(blocks)
    difference = float((found - right).abs().max() / right.abs().max())
    # NaN is not within the bound either.
    if not difference <= LARGEST_DIFFERENCE.get(model.dtype, OTHER_DIFFERENCE):
        raise OtherLogits(
            f"a graph of {size} rows differs from the forward pass by {difference:.2g} of the largest logit"
        )


def trial_inputs(vocab_size: int, config: EngineConfig, most: int) -> StepInputs:
    """Different tokens at different lengths, each with blocks of its own: as many rows as the pool has room
    for, `most` at most."""
    count = min(most, config.num_kv_blocks)
    num_blocks = max(1, min(2, config.num_kv_blocks // count, config.max_model_len // config.block_size))
    rows = torch.arange(count)
    tables = 1 + torch.arange(count * num_blocks).view(count, num_blocks)
    lengths = (num_blocks - 1) * config.block_size + 1 + rows % config.block_size
    positions = lengths.clamp(max=config.max_model_len) - 1
    own = tables[rows, positions // config.block_size]
    return StepInputs(
        token_ids=rows * TOKEN_STRIDE % vocab_size,
        positions=positions,
        logits_rows=rows,
        batch=AttentionBatch(
            slots=own * config.block_size + positions % config.block_size,
            blocks_begun=rows[:0],
            single_rows=rows,
            single_lengths=positions + 1,
            single_tables=tables,
            chunks=(),
        ),
    )
