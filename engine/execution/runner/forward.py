"""One pass of a model over tokens that are on its device already.

Law: nothing is read back to the host here, so that the pass may be captured where the attention may be. Knows
no schedule and no pool.
"""

import torch
from transformers import PreTrainedModel

from engine.execution.attention.interface import AttentionMetadata


def run_model(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logits_rows: torch.Tensor,
    step: AttentionMetadata,
) -> torch.Tensor:
    """Logits [wanted rows, vocabulary] in the model's dtype, of `token_ids` and `positions` [tokens]."""
    logits: torch.Tensor = model(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logits_rows,
        attention_metadata=step,
    ).logits[0]
    if len(logits) == len(token_ids) != len(logits_rows):
        # A model that does not know `logits_to_keep` computes them all.
        logits = logits[logits_rows]
    return logits
