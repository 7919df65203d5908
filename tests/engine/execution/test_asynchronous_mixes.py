"""Asynchronous scheduling on pools that are too small: each request in a mix is itself alone.

The launcher refuses items and fails at random. `simulated_device.py` checks each write and each read.
"""

import pytest

from tests.engine.execution.mixes import Counts, run_mix

SEEDS = {True: range(80), False: range(150, 230)}
"""Among them are mixes of both kinds that wrote beyond a block table when a stored list said who decodes."""


@pytest.mark.parametrize("is_tiny", [True, False], ids=["tiny blocks", "ordinary blocks"])
def test_a_request_in_a_mix_is_itself_alone(is_tiny: bool) -> None:
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
def test_values_that_were_not_finite_fail_no_request_after_the_mix(is_tiny: bool) -> None:
    """Rows come out as not finite at random, of requests that end in every way; their prompts come again."""
    counts = Counts()
    for seed in SEEDS[is_tiny][:40]:
        run_mix(seed, counts, is_tiny=is_tiny, glitch_rate=0.02 if is_tiny else 0.003)
    assert counts.num_glitches > 20
    assert {"cancelled", "timeout", "error"} <= counts.ends.keys()
