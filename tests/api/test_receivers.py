"""Who lets callers wait in vain gets few of them."""

from api.receivers import MAX_IN_VAIN, Receivers
from api.webhook_url import parse_url

DEAD, ALIVE = parse_url("http://dead.example/a"), parse_url("http://alive.example/")


def test_one_of_whom_nothing_is_known_may_have_them_all():
    receivers = Receivers()
    assert all(receivers.enter(DEAD) for _ in range(100))


def test_one_that_did_not_answer_has_few_until_it_does():
    receivers = Receivers()
    assert receivers.enter(DEAD)
    receivers.leave(DEAD, answered=False)
    other_path = parse_url("http://dead.example/b")
    assert [receivers.enter(other_path) for _ in range(MAX_IN_VAIN + 1)] == [True] * MAX_IN_VAIN + [False]
    assert receivers.enter(ALIVE)
    receivers.leave(DEAD, answered=False)
    assert receivers.enter(DEAD)
    assert not receivers.enter(DEAD)
    receivers.leave(DEAD, answered=True)
    assert all(receivers.enter(DEAD) for _ in range(100))


def test_nothing_is_kept_of_those_that_answered():
    receivers = Receivers()
    for target in (DEAD, ALIVE):
        receivers.enter(target)
        receivers.leave(target, answered=False)
        receivers.enter(target)
        receivers.leave(target, answered=True)
    assert not receivers._callers
    assert not receivers._silent
