"""The receiver of webhooks can find against: a wrong signature, another task's name, another end."""

import json
from collections.abc import Iterator

import pytest
import redis

from api.webhooks import signature as webhook_signature
from tests.chaos.hooks import KEY, SECRET, Receiver, hasten
from tests.live_service import http
from tests.tokenmill.protocol.store.tasks import claim_one, settle, submission
from tokenmill.protocol.store.outbox import Outbox
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


def test_what_is_right_is_told(receiver: Receiver) -> None:
    assert parse_secrets(SECRET) == (KEY,)
    assert [post(receiver), post(receiver)] == [204, 204]
    assert (receiver.told, receiver.complaints) == ({"t": ["completed", "completed"]}, [])


def test_one_that_fails_has_heard_nothing(receiver: Receiver) -> None:
    receiver.is_failing = True
    assert post(receiver) == 503
    assert (receiver.told, receiver.num_refused) == ({}, 1)
    receiver.is_failing = False
    assert post(receiver) == 204


def test_a_wrong_signature_is_seen(receiver: Receiver) -> None:
    assert post(receiver, key=KEY[::-1]) == 400
    assert receiver.told == {}
    assert "wrong signature" in receiver.complaints[0]


@pytest.mark.parametrize(
    ("body", "message_id"), [(BODY, "msg_u"), ({**BODY, "type": "task.cancelled"}, "msg_t")]
)
def test_what_does_not_agree_with_itself_is_seen(receiver: Receiver, body: object, message_id: str) -> None:
    post(receiver, body, message_id)
    assert len(receiver.complaints) == 1


@pytest.mark.parametrize("dies", [True, False])
def test_time_passes_for_webhooks_that_wait(redis_client: "redis.Redis", dies: bool) -> None:
    """Of a deliverer that died with it in hand, and of one that is to try it again."""
    store, outbox = TaskStore(redis_client), Outbox(redis_client)
    hasten(redis_client)
    one = submission(redis_client, webhook="http://127.0.0.1:1/")
    store.submit(one)
    settle(store, claim_one(store), 0, 1)
    (webhook,) = outbox.take(5, silence_seconds=120)
    if not dies:
        outbox.retry(webhook, 3600)
    assert outbox.take(5, silence_seconds=120) == []
    hasten(redis_client)
    assert [again.task_id for again in outbox.take(5, silence_seconds=120)] == [one.task_id]
