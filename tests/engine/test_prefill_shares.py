"""How a step is dealt out between prompts: what a token costs far into one, and who gets what is left."""

import pytest

from engine.budget import SchedulingBudget
from engine.config import EngineConfig
from engine.prefill_shares import PrefillShares
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


def dealt(context_unit: int | None) -> list[int]:
    """32 tokens of a step, between two prompts of which 16 tokens are computed; at first each takes 4."""
    config = EngineConfig(
        max_model_len=128,
        num_kv_blocks=64,
        max_num_batched_tokens=32,
        max_chunk_tokens=4,
        context_unit=context_unit,
    )
    shares = PrefillShares(config, SchedulingBudget.of(config))
    params = SamplingParams(max_tokens=1)
    sequences = [Sequence(name, [1] * 100, params, arrival=0.0) for name in ("first", "second")]
    for sequence in sequences:
        sequence.num_computed_tokens = 16
        shares.take(sequence, shares.first_share(sequence, 16))
    found = shares.deal()
    return [found[sequence] for sequence in sequences]


@pytest.mark.parametrize(
    ("context_unit", "right"),
    [
        (None, [28, 4]),
        # Each token takes two of the step's: 8 and 8 at first, and what is left is for 8 tokens of the first.
        (16, [12, 4]),
        # Three: 12 and 12, and of the 8 that are left two tokens; what is then over is nobody's.
        (8, [6, 4]),
    ],
)
def test_what_is_left_costs_as_much_as_what_was_taken_first(
    context_unit: int | None, right: list[int]
) -> None:
    assert dealt(context_unit) == right
