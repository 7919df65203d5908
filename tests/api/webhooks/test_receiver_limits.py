"""One receiver or one tenant occupies a bounded number of deliveries."""

from typing import Any

from api.webhooks.receiver_limits import MAX_ANSWERING, MAX_UNPROVEN, ReceiverLimits

DEAD, ALIVE = ["203.0.113.1"], ["198.51.100.1"]


def entered(limits: Any, addresses: Any, tries: Any = 100) -> Any:
    return sum(limits.enter(addresses) for _ in range(tries))


def test_an_unproven_receiver_gets_few_deliveries() -> None:
    assert entered(ReceiverLimits(16), DEAD) == MAX_UNPROVEN


def test_an_answering_receiver_gets_more_until_it_stops() -> None:
    limits = ReceiverLimits(16)
    assert limits.enter(DEAD)
    limits.leave(DEAD, answered=True)
    assert entered(limits, DEAD) == MAX_ANSWERING
    assert limits.enter(ALIVE)
    for _ in range(MAX_ANSWERING):
        limits.leave(DEAD, answered=False)
    assert limits.is_silent(DEAD)
    assert not limits.is_silent(ALIVE)
    assert entered(limits, DEAD) == MAX_UNPROVEN


def test_all_names_of_one_address_count_as_one() -> None:
    limits = ReceiverLimits(16)
    assert entered(limits, ["203.0.113.1", "203.0.113.2"]) == MAX_UNPROVEN
    for addresses in (["203.0.113.2"], ["::ffff:203.0.113.1"], ["203.0.113.9", "203.0.113.1"]):
        assert not limits.enter(addresses)
    # A refused delivery is not counted for any of its addresses.
    assert entered(limits, ["203.0.113.9"]) == MAX_UNPROVEN


def test_a_network_of_one_ipv6_host_counts_as_one() -> None:
    limits = ReceiverLimits(16)
    assert sum(limits.enter([f"2001:db8::{n:x}"]) for n in range(1, 50)) == MAX_UNPROVEN
    assert limits.enter(["2001:db8:0:1::1"])


def test_a_tenant_has_a_limit() -> None:
    limits = ReceiverLimits(8)
    assert sum(limits.enter_tenant("a") for _ in range(20)) == 8
    assert limits.enter_tenant("b")
    limits.leave_tenant("a")
    assert limits.enter_tenant("a")
    assert not limits.enter_tenant("a")


def test_finished_deliveries_are_not_counted() -> None:
    limits = ReceiverLimits(8)
    for addresses in (DEAD, ALIVE):
        limits.enter_tenant("a")
        limits.enter(addresses)
        limits.leave(addresses, answered=False)
        limits.leave_tenant("a")
    assert limits.num_in_progress == 0
    assert [limits.is_silent(one) for one in (DEAD, ALIVE)] == [True, True]
    assert entered(limits, DEAD) == MAX_UNPROVEN
