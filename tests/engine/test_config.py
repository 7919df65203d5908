"""Limits are checked where they are set."""

import pytest

from engine.config import EngineConfig
from engine.errors import InvalidParameter


@pytest.mark.parametrize(
    "field",
    [
        "max_model_len",
        "num_kv_blocks",
        "block_size",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_num_prefill_seqs",
    ],
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5])
def test_a_limit_that_is_no_limit_is_refused_at_the_start(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=field):
        EngineConfig(**{"max_model_len": 8, "num_kv_blocks": 8, field: value})  # type: ignore[arg-type]
