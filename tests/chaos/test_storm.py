"""One seed gives one course of faults and of requests; a storm that breaks is not taken for a calm."""

from itertools import islice
from random import Random
from typing import Any

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.errands import READERS, Errand, errand, errands
from tests.chaos.faults import TO_PROCESSES, TO_REDIS
from tests.chaos.storm import Storm, deck

NO_CLUSTER: Any = None


def names(seed: int, count: int) -> list[str]:
    return [name for name, _ in islice(deck(TO_REDIS, Random(seed)), count)]


def test_a_seed_gives_the_order_of_the_faults() -> None:
    number = len(TO_REDIS)
    assert names(1, 3 * number) == names(1, 3 * number)
    assert len({tuple(names(seed, number)) for seed in range(20)}) > 10
    for round_number in range(3):
        assert sorted(names(1, 3 * number)[round_number * number :][:number]) == sorted(TO_REDIS)


def strike(*faults: str, seconds: float | None = None) -> tuple[Storm, list[str]]:
    """A storm of faults that only note their names; "broken" raises."""
    struck: list[str] = []

    def make(name: str) -> Any:
        def fault(cluster: Cluster, chance: Random) -> None:
            struck.append(name)
            if name == "broken":
                raise RuntimeError("the storm broke")

        return fault

    storm = Storm(
        NO_CLUSTER, {name: make(name) for name in faults}, Random(1), pauses=(0, 0), say=lambda _: None
    )
    storm.start(seconds)
    return storm, struck


def test_each_fault_strikes_once() -> None:
    storm, struck = strike("a", "b", "c")
    storm.wait()
    assert sorted(struck) == ["a", "b", "c"]
    assert storm.num_struck == 3


def test_what_breaks_a_storm_is_raised() -> None:
    storm, _ = strike("a", "broken")
    with pytest.raises(RuntimeError, match="the storm broke"):
        storm.wait()


def test_there_is_a_storm_over_each_part_of_the_service() -> None:
    assert {
        "kill_worker", "freeze_worker", "hang_worker", "drain_worker", "restart_workers", "kill_api",
        "fail_receiver",
    } <= TO_PROCESSES.keys()  # fmt: skip
    assert {
        "cut_clients",
        "cut_subscribers",
        "restart_redis",
        "fill_memory",
        "demote_redis",
    } <= TO_REDIS.keys()


def test_a_seed_gives_the_errands_and_a_few_hold_every_kind() -> None:
    few: list[Errand] = list(islice(errands(3), 30))
    assert few == [errand(3, number) for number in range(30)]
    assert few != list(islice(errands(4), 30))
    assert {one.reader for one in few} == set(READERS)
    assert {one.is_greedy for one in few} == {True, False}
    for kind in ("prompt", "messages", "prompt_token_ids", "stop", "seed"):
        assert any(kind in one.body for one in few), kind
    assert 2 <= sum(one.cancel_at is not None for one in few) <= 10
    assert len({one.key for one in few if one.key}) == sum(one.key is not None for one in few)
    assert any(one.resubmits for one in few)
    assert any(one.has_webhook for one in few)
    leavers = [one for one in few if one.reader == "leaver"]
    assert leavers == [one for one in few if one.leave_at is not None]
    assert {one.body.get("on_disconnect") for one in leavers} == {"cancel"}
    assert {one.may_end_as for one in leavers} == {frozenset({"completed", "cancelled"})}
    assert not any(one.resubmits for one in few if one.key is None)
