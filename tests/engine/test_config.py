"""Validation of the engine's configuration."""

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
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", 8.5])
def test_an_invalid_limit_is_rejected(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=field):
        EngineConfig(**{"max_model_len": 8, "num_kv_blocks": 8, field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("policy", "lifo"),
        *[(field, "no") for field in ("chunked_prefill", "prefix_caching")],
        *[("max_skip_ahead", value) for value in (0, -1, 1.5)],
        *[("max_chunk_tokens", value) for value in (0, True)],
        *[("max_preemptions", value) for value in (-1, None)],
        *[("num_speculative_tokens", value) for value in (-1, None, 1.5)],
        *[("prefill_reserve", value) for value in (-0.1, 0.95, float("nan"), None)],
        *[(field, value) for field in ("ageing_seconds", "max_waiting_seconds") for value in (0, -1.0, "5")],
    ],
)
def test_an_invalid_policy_is_rejected(field: str, value: object) -> None:
    with pytest.raises(InvalidParameter, match=field):
        EngineConfig(**{"max_model_len": 8, "num_kv_blocks": 8, field: value})  # type: ignore[arg-type]


def test_the_prefill_reserve_is_less_than_a_step() -> None:
    for max_num_batched_tokens in range(1, 40):
        config = EngineConfig(
            max_model_len=8,
            num_kv_blocks=8,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_reserve=0.9,
        )
        assert config.num_reserved_tokens < max_num_batched_tokens
