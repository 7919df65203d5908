"""Slots for calls that wait and for replies that are being built, shared between tenants."""

import contextlib
import threading

from api.app import ApiApp
from api.tenant_slots import TenantSlots
from tests.api.api_client import ApiClient
from tests.api.conftest import Submit


def test_slots_are_released() -> None:
    slots = TenantSlots(2)
    with slots.acquire() as first, slots.acquire() as second, slots.acquire() as third:
        assert (first, second, third) == (True, True, False)
    with slots.acquire() as again:
        assert again


def test_a_tenant_gets_slots_while_it_holds_fewer_than_are_free() -> None:
    slots = TenantSlots(8, is_shared=True)
    with contextlib.ExitStack() as stack:
        acquired = [stack.enter_context(slots.acquire("a")) for _ in range(8)]
        assert acquired == [True] * 4 + [False] * 4
        assert [stack.enter_context(slots.acquire("b")) for _ in range(3)] == [True, True, False]
        # A tenant that holds none gets one as long as any is free.
        assert stack.enter_context(slots.acquire("c"))
    with slots.acquire("a") as again:
        assert again
    assert slots.num_held == 0


def test_without_sharing_one_tenant_gets_all_slots() -> None:
    slots = TenantSlots(3)
    with contextlib.ExitStack() as stack:
        assert [stack.enter_context(slots.acquire("a")) for _ in range(4)] == [True] * 3 + [False]


def test_a_call_waits_until_a_slot_is_released() -> None:
    slots = TenantSlots(1, wait_seconds=60)
    order: list[str] = []
    entered = threading.Event()

    def second() -> None:
        entered.set()
        with slots.acquire("a"):
            order.append("second")

    with slots.acquire("a"):
        thread = threading.Thread(target=second)
        thread.start()
        assert entered.wait(60)
        order.append("first")
    thread.join(60)
    assert order == ["first", "second"]


def test_polls_need_a_reply_slot_and_submissions_do_not(
    app: ApiApp, client: ApiClient, submit: Submit
) -> None:
    """Other calls hold all slots."""
    task_id = submit()
    slots = app.parts.reply_slots
    slots.wait_seconds = 0
    with contextlib.ExitStack() as stack:
        while stack.enter_context(slots.acquire("another")):
            pass
        reply = client.get(f"/v1/tasks/{task_id}")
        assert (reply.status_code, reply.json["error"]["code"]) == (503, "busy")
        assert reply.headers["Retry-After"]
        assert client.post("/v1/tasks", json={"prompt": "x"}).status_code == 202
    assert client.get(f"/v1/tasks/{task_id}").status_code == 200
