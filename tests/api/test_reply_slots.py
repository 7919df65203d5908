"""How many replies are built at once."""

import threading

import pytest

from api.problems import Problem
from api.reply_slots import ReplySlots


def test_a_slot_is_given_back():
    slots = ReplySlots(is_shared=False, slots=1, wait_seconds=0)
    for _ in range(2):
        with slots.take("a"):
            pass


def test_where_none_becomes_free_the_call_is_refused():
    slots = ReplySlots(is_shared=False, slots=1, wait_seconds=0)
    with slots.take("a"), pytest.raises(Problem) as refused, slots.take("a"):
        pass
    assert (refused.value.status, refused.value.code) == (503, "busy")


def test_a_tenant_leaves_half_to_others():
    slots = ReplySlots(is_shared=True, slots=2, wait_seconds=0)
    with slots.take("a"):
        with pytest.raises(Problem), slots.take("a"):
            pass
        with slots.take("b"):
            pass


def test_one_tenant_alone_has_all():
    slots = ReplySlots(is_shared=False, slots=2, wait_seconds=0)
    with slots.take("a"), slots.take("a"):
        pass


def test_a_call_waits_until_another_ends():
    slots = ReplySlots(is_shared=False, slots=1, wait_seconds=60)
    order = []
    entered = threading.Event()

    def second():
        entered.set()
        with slots.take("a"):
            order.append("second")

    with slots.take("a"):
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_polls_wait_for_slots_and_submissions_do_not(client, submit, monkeypatch):
    """All slots are taken by other calls."""
    task_id = submit()
    slots = client.application.extensions["reply_slots"]
    monkeypatch.setattr(slots, "_wait_seconds", 0)
    monkeypatch.setattr(slots, "_slots", 0)
    reply = client.get(f"/v1/tasks/{task_id}")
    assert (reply.status_code, reply.json["error"]["code"]) == (503, "busy")
    assert reply.headers["Retry-After"]
    assert client.post("/v1/tasks", json={"prompt": "x"}).status_code == 202
    monkeypatch.setattr(slots, "_slots", 1)
    assert client.get(f"/v1/tasks/{task_id}").status_code == 200
