"""Asynchronous scheduling on pools that are too small: each request gives what it gives alone.

The executor refuses items and fails at random. `simulated_device.py` checks each write and each read.
"""

import pytest

from tests.engine.execution.mixes import Counts, run_mix

SEEDS = {True: range(80), False: range(150, 230)}
"""Among them are mixes of both kinds that wrote beyond a block table when a stored list said who decodes."""


@pytest.mark.parametrize("is_tiny", [True, False], ids=["tiny blocks", "ordinary blocks"])
def test_a_request_in_a_mix_gives_what_it_gives_alone(is_tiny: bool) -> None:
    counts = Counts()
    for seed in SEEDS[is_tiny]:
        run_mix(seed, counts, is_tiny=is_tiny)
    assert counts.num_compared > 200
    assert counts.num_preempted > 40
    assert counts.num_ahead > 300
    assert counts.num_refused > 300
    assert counts.num_faults > 10
    assert {"length", "stop", "cancelled", "timeout", "error"} <= counts.ends.keys()


@pytest.mark.parametrize("is_tiny", [True, False], ids=["tiny blocks", "ordinary blocks"])
def test_non_finite_values_fail_no_later_request(is_tiny: bool) -> None:
    """Rows are non-finite at random, in requests that end in every way; their prompts are repeated."""
    counts = Counts()
    for seed in SEEDS[is_tiny][:40]:
        run_mix(seed, counts, is_tiny=is_tiny, glitch_rate=0.02 if is_tiny else 0.003)
    assert counts.num_glitches > 20
    assert {"cancelled", "timeout", "error"} <= counts.ends.keys()
