"""The receiver of webhooks detects wrong signatures and contradictory webhooks."""

import json
from collections.abc import Iterator

import pytest
import redis

from api.webhooks import signature as webhook_signature
from tests.chaos.webhook_receiver import KEY, SECRET, Receiver, make_webhooks_due
from tests.live_service import http
from tests.tokenmill.protocol.store.tasks import claim_one, settle, submission
from tokenmill.protocol.store.outbox import Attempt, Outbox
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.credentials import parse_secrets

BODY = {"type": "task.completed", "data": {"id": "t", "status": "completed"}}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def post(receiver: Receiver, body: object = BODY, message_id: str = "msg_t", key: bytes = KEY) -> int:
    text = json.dumps(body).encode()
    return http("POST", receiver.url, body, webhook_signature.headers([key], message_id, 5, text)).status


def test_a_correct_webhook_is_recorded(receiver: Receiver) -> None:
    assert parse_secrets(SECRET) == (KEY,)
    assert [post(receiver), post(receiver)] == [204, 204]
    assert (receiver.received, receiver.complaints) == ({"t": ["completed", "completed"]}, [])


def test_a_failing_receiver_records_nothing(receiver: Receiver) -> None:
    receiver.is_failing = True
    assert post(receiver) == 503
    assert (receiver.received, receiver.num_refused) == ({}, 1)
    receiver.is_failing = False
    assert post(receiver) == 204


def test_a_wrong_signature_is_a_complaint(receiver: Receiver) -> None:
    assert post(receiver, key=KEY[::-1]) == 400
    assert receiver.received == {}
    assert "wrong signature" in receiver.complaints[0]


@pytest.mark.parametrize(
    ("body", "message_id"), [(BODY, "msg_u"), ({**BODY, "type": "task.cancelled"}, "msg_t")]
)
def test_a_contradictory_webhook_is_a_complaint(receiver: Receiver, body: object, message_id: str) -> None:
    post(receiver, body, message_id)
    assert len(receiver.complaints) == 1


@pytest.mark.parametrize("dies", [True, False])
def test_waiting_webhooks_can_be_made_due(redis_client: "redis.Redis", dies: bool) -> None:
    """Both a delivery whose process died and one that waits for its next attempt."""
    store, outbox = TaskStore(redis_client), Outbox(redis_client)
    make_webhooks_due(redis_client)
    one = submission(redis_client, webhook="http://127.0.0.1:1/")
    store.submit(one)
    settle(store, claim_one(store), 0, 1)
    (webhook,) = outbox.take(5, silence_seconds=120)
    if not dies:
        outbox.retry(webhook, 3600, Attempt(503, "status 503"))
    assert outbox.take(5, silence_seconds=120) == []
    make_webhooks_due(redis_client)
    assert [again.task_id for again in outbox.take(5, silence_seconds=120)] == [one.task_id]
