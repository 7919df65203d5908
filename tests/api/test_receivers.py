"""A receiver or a tenant occupies a few deliveries at once, whatever names the receiver has."""

from api.receivers import MAX_CALLERS, MAX_IN_VAIN, Receivers

DEAD, ALIVE = ["203.0.113.1"], ["203.0.113.2"]


def num_entered(receivers: Receivers, addresses: list[str]) -> int:
    """How many callers are let in until one is not."""
    count = 0
    while receivers.enter(addresses):
        count += 1
    return count


def test_one_that_was_never_called_gets_few_until_it_answers() -> None:
    receivers = Receivers(max_per_tenant=100)
    assert num_entered(receivers, DEAD) == MAX_IN_VAIN
    receivers.leave(DEAD, answered=True)
    assert num_entered(receivers, DEAD) == MAX_CALLERS - (MAX_IN_VAIN - 1)


def test_one_that_did_not_answer_has_few_until_it_does() -> None:
    receivers = Receivers(max_per_tenant=100)
    receivers.enter(DEAD)
    receivers.leave(DEAD, answered=True)
    assert num_entered(receivers, DEAD) == MAX_CALLERS
    receivers.leave(DEAD, answered=False)
    assert num_entered(receivers, DEAD) == 0
    assert num_entered(receivers, ALIVE) == MAX_IN_VAIN, "another address"


def test_names_of_one_address_count_as_one() -> None:
    """Also as IPv6, of which one network is one receiver."""
    receivers = Receivers(max_per_tenant=100)
    assert num_entered(receivers, [*DEAD, "203.0.113.9"]) == MAX_IN_VAIN
    assert num_entered(receivers, DEAD) == 0
    assert num_entered(receivers, ["::ffff:203.0.113.9"]) == 0
    assert num_entered(receivers, ["2001:db8::1"]) == MAX_IN_VAIN
    assert num_entered(receivers, ["2001:db8::2"]) == 0
    assert num_entered(receivers, ["2001:db8:1::1"]) == MAX_IN_VAIN


def test_a_refused_caller_occupies_none_of_its_addresses() -> None:
    receivers = Receivers(max_per_tenant=100)
    num_entered(receivers, DEAD)
    assert not receivers.enter([*ALIVE, *DEAD])
    assert num_entered(receivers, ALIVE) == MAX_IN_VAIN


def test_a_tenant_has_its_limit() -> None:
    receivers = Receivers(max_per_tenant=2)
    assert [receivers.enter_tenant("a") for _ in range(3)] == [True, True, False]
    assert receivers.enter_tenant("b")
    receivers.leave_tenant("a")
    assert receivers.enter_tenant("a")
