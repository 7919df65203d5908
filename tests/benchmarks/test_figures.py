"""The arithmetic of one run and of several."""

import math

import pytest

from benchmarks.serving.figures import (
    Agreement,
    agreement,
    first_token_seconds,
    inter_token_seconds,
    percentile,
    run_figures,
    spread,
)
from benchmarks.serving.protocol import Request, Served

REQUESTS = [Request([1, 2], 3), Request([3], 2, arrival=1.0)]
SERVED = [Served([7, 8, 9], [0.5, 0.75, 2.0]), Served([7, 8], [1.5, 3.0])]


@pytest.mark.parametrize(("percent", "value"), [(0, 1.0), (50, 2.5), (90, 3.7), (100, 4.0)])
def test_a_percentile_lies_on_the_line_between_two_ranks(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == pytest.approx(value)


def test_percentiles_of_one_value_and_of_none() -> None:
    assert percentile([5.0], 99) == 5.0
    assert math.isnan(percentile([], 50))


def test_a_spread_is_the_median_the_least_and_the_most() -> None:
    assert spread([3.0, 1.0, 8.0]) == (3.0, 1.0, 8.0)


def test_first_tokens_count_from_the_arrival_of_their_request() -> None:
    assert first_token_seconds(REQUESTS, SERVED) == [0.5, 0.5]


def test_inter_token_times_are_those_within_a_request() -> None:
    assert inter_token_seconds(SERVED) == [0.25, 1.25, 1.5]


def test_a_run_lasts_until_its_last_token() -> None:
    figures = run_figures(REQUESTS, SERVED)
    assert figures["seconds"] == 3.0
    assert figures["output_tokens"] == 5
    assert figures["tokens_per_second"] == pytest.approx(5 / 3)
    assert figures["requests_per_second"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "short",
    [Served([7, 8], [0.5, 0.75, 2.0]), Served([7, 8, 9], [0.5, 0.75]), Served([7, 8, 9, 1], [0.1] * 4)],
)
def test_a_run_with_other_than_the_tokens_asked_for_is_no_run(short: Served) -> None:
    with pytest.raises(ValueError, match="request 0"):
        run_figures(REQUESTS, [short, SERVED[1]])


def test_agreement_ends_at_the_first_other_token() -> None:
    reference = [[1, 2, 3, 4], [5, 6]]
    tokens = [[1, 2, 9, 4], [5, 6], [7, 7, 7]]
    assert agreement(reference, tokens) == Agreement(requests=1, of_requests=2, tokens=4, of_tokens=6)
