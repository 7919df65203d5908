"""One receiver or one tenant occupies a bounded number of deliveries."""

from api.webhooks.receivers import MAX_CALLERS, MAX_IN_VAIN, Receivers

DEAD, ALIVE = ["203.0.113.1"], ["198.51.100.1"]


def entered(receivers, addresses, tries=100):
    return sum(receivers.enter(addresses) for _ in range(tries))


def test_one_that_has_not_answered_yet_occupies_few():
    assert entered(Receivers(16), DEAD) == MAX_IN_VAIN


def test_one_that_answers_occupies_more_until_it_does_not():
    receivers = Receivers(16)
    assert receivers.enter(DEAD)
    receivers.leave(DEAD, answered=True)
    assert entered(receivers, DEAD) == MAX_CALLERS
    assert receivers.enter(ALIVE)
    for _ in range(MAX_CALLERS):
        receivers.leave(DEAD, answered=False)
    assert receivers.is_silent(DEAD)
    assert not receivers.is_silent(ALIVE)
    assert entered(receivers, DEAD) == MAX_IN_VAIN


def test_all_names_of_one_address_count_as_one():
    receivers = Receivers(16)
    assert entered(receivers, ["203.0.113.1", "203.0.113.2"]) == MAX_IN_VAIN
    for addresses in (["203.0.113.2"], ["::ffff:203.0.113.1"], ["203.0.113.9", "203.0.113.1"]):
        assert not receivers.enter(addresses)
    # Nothing is counted of one that was refused.
    assert entered(receivers, ["203.0.113.9"]) == MAX_IN_VAIN


def test_a_network_of_one_ipv6_host_counts_as_one():
    receivers = Receivers(16)
    assert sum(receivers.enter([f"2001:db8::{n:x}"]) for n in range(1, 50)) == MAX_IN_VAIN
    assert receivers.enter(["2001:db8:0:1::1"])


def test_a_tenant_occupies_its_limit():
    receivers = Receivers(8)
    assert sum(receivers.enter_tenant("a") for _ in range(20)) == 8
    assert receivers.enter_tenant("b")
    receivers.leave_tenant("a")
    assert receivers.enter_tenant("a")
    assert not receivers.enter_tenant("a")


def test_nothing_is_kept_of_calls_that_are_over():
    receivers = Receivers(8)
    for addresses in (DEAD, ALIVE):
        receivers.enter_tenant("a")
        receivers.enter(addresses)
        receivers.leave(addresses, answered=False)
        receivers.leave_tenant("a")
    assert not receivers._callers
    assert not receivers._tenants
    assert not receivers._answering
    assert [receivers.is_silent(one) for one in (DEAD, ALIVE)] == [True, True]
