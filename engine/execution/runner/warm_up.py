"""Steps that are run once before a worker is ready, so that no kernel is compiled for a request.

Triton compiles a variant of a kernel when it is first launched. A chunk of a prompt, a decode whose block
table is short and one whose table is long take different variants. The steps use the null block alone.
"""

from collections.abc import Iterator

import torch

from engine.execution.attention.interface import AttentionBatch, Chunk
from engine.execution.runner.inputs import StepInputs

LONG_TOKENS = 1024
"""Length of the decode with a long table: its keys are read in several parts."""


def warm_up_inputs(max_model_len: int, block_size: int) -> Iterator[StepInputs]:
    """Steps of a two-token chunk beside a decode, with a short table and with a long one."""
    for length in sorted({1, min(LONG_TOKENS, max_model_len)}):
        yield _step(length, block_size)


def _step(length: int, block_size: int) -> StepInputs:
    """Row 0 is a decode of `length` tokens, rows 1 and 2 are a prompt. All tokens are token 0."""
    table = torch.zeros(-(-length // block_size), dtype=torch.int64)
    first = torch.zeros(1, dtype=torch.int64)
    batch = AttentionBatch(
        slot_mapping=torch.tensor([0, 0, 1 % block_size]),
        blocks_begun=first,
        decode_rows=first,
        decode_lengths=first + length,
        decode_tables=table[None],
        chunks=(Chunk(1, 2, 0, torch.zeros(-(-2 // block_size), dtype=torch.int64)),),
    )
    return StepInputs(
        token_ids=torch.zeros(3, dtype=torch.int64),
        positions=torch.tensor([length - 1, 0, 1]),
        logits_rows=torch.tensor([0, 2]),
        batch=batch,
    )
