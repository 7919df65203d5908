"""Faults and requests follow from the seed, and a fault that raises is reported."""

from itertools import islice
from random import Random
from typing import Any

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.faults import TO_PROCESSES, TO_REDIS
from tests.chaos.injector import FaultInjector, fault_order
from tests.chaos.workload import READERS, Request, request, requests

NO_CLUSTER: Any = None


def names(seed: int, count: int) -> list[str]:
    return [name for name, _ in islice(fault_order(TO_REDIS, Random(seed)), count)]


def test_a_seed_gives_the_order_of_the_faults() -> None:
    number = len(TO_REDIS)
    assert names(1, 3 * number) == names(1, 3 * number)
    assert len({tuple(names(seed, number)) for seed in range(20)}) > 10
    for round_number in range(3):
        assert sorted(names(1, 3 * number)[round_number * number :][:number]) == sorted(TO_REDIS)


def inject(*faults: str, seconds: float | None = None) -> tuple[FaultInjector, list[str]]:
    """An injector of faults that record their names; "broken" raises."""
    injected: list[str] = []

    def make(name: str) -> Any:
        def fault(cluster: Cluster, chance: Random) -> None:
            injected.append(name)
            if name == "broken":
                raise RuntimeError("the fault broke")

        return fault

    injector = FaultInjector(
        NO_CLUSTER, {name: make(name) for name in faults}, Random(1), pauses=(0, 0), say=lambda _: None
    )
    injector.start(seconds)
    return injector, injected


def test_each_fault_is_injected_once() -> None:
    injector, injected = inject("a", "b", "c")
    injector.wait()
    assert sorted(injected) == ["a", "b", "c"]
    assert injector.num_injected == 3


def test_an_error_of_a_fault_is_raised() -> None:
    injector, _ = inject("a", "broken")
    with pytest.raises(RuntimeError, match="the fault broke"):
        injector.wait()


def test_each_part_of_the_service_has_faults() -> None:
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


def test_requests_follow_from_the_seed_and_a_few_contain_every_kind() -> None:
    few: list[Request] = list(islice(requests(3), 30))
    assert few == [request(3, number) for number in range(30)]
    assert few != list(islice(requests(4), 30))
    assert {one.reader for one in few} == set(READERS)
    assert {one.is_greedy for one in few} == {True, False}
    for kind in ("prompt", "messages", "prompt_token_ids", "stop", "seed"):
        assert any(kind in one.body for one in few), kind
    assert 2 <= sum(one.cancel_at is not None for one in few) <= 10
    assert len({one.key for one in few if one.key}) == sum(one.key is not None for one in few)
    assert any(one.resubmits for one in few)
    assert any(one.has_webhook for one in few)
    disconnecters = [one for one in few if one.reader == "disconnecter"]
    assert disconnecters == [one for one in few if one.disconnect_at is not None]
    assert {one.body.get("on_disconnect") for one in disconnecters} == {"cancel"}
    assert {one.may_end_as for one in disconnecters} == {frozenset({"completed", "cancelled"})}
    assert not any(one.resubmits for one in few if one.key is None)
