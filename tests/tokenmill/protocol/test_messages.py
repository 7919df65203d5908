"""Events have one JSON form, which Python and the script write alike and which decodes without loss."""

import json

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import HARD_TEXTS
from tokenmill.protocol import keys
from tokenmill.protocol.messages import (
    GenerateRequest,
    LogEntry,
    ProtocolError,
    TaskError,
    UnknownEvent,
    Usage,
    decode,
    decode_any,
    encode,
)
from tokenmill.protocol.records import Accepted, Claimed, Write
from tokenmill.protocol.store.task_store import TaskStore

USAGE = Usage(prompt_tokens=3, completion_tokens=7, cached_tokens=1)
ERROR = TaskError(type="server_error", code="internal", message='broken: "ü"\n', param="prompt")
LOGPROB = {"id": 5, "logprob": -0.1, "token": "é", "bytes": [195, 169]}

ENTRIES = [
    LogEntry.of_token(5, "plain"),
    *(LogEntry.of_token(6, text) for text in HARD_TEXTS),
    LogEntry.of_token(7, "", index=2),
    LogEntry.of_token(8, "x", members={"logprobs": {**LOGPROB, "top": [LOGPROB]}}),
    LogEntry.of_token(9, "x", members={"logprobs": LOGPROB, "prompt_logprobs": [None, LOGPROB]}),
    LogEntry.of_end("rest", "length", index=2, done=False),
    LogEntry.of_end("", "error", index=1, done=False, error=ERROR),
    LogEntry.of_end("", "error", error=ERROR, usage=USAGE),
    LogEntry.of_end("\u2028", "stop", usage=USAGE),
    LogEntry.of_end("", "cancelled"),
]


def published(store: TaskStore, client: RedisClient, claimed: Claimed, *entries: LogEntry) -> list[bytes]:
    """The messages that the script publishes for `entries`, the first of the log."""
    with client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(keys.channel(claimed.task_id))
        while not pubsub.subscribed:
            pubsub.get_message(timeout=1)
        pubsub.get_message(timeout=1)
        write = Write(task_id=claimed.task_id, owner=claimed.owner, entries=entries)
        assert store.publish([write]) == [Accepted()]
        messages = [pubsub.get_message(timeout=60) for _ in entries]
    return [message["data"] for message in messages if message]


def test_python_and_the_script_write_the_same_bytes(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    messages = published(store, redis_client, claimed, *ENTRIES)

    events = [entry.to_event(claimed.task_id, seq) for seq, entry in enumerate(ENTRIES)]
    assert [encode(event).encode() for event in events] == messages
    assert [decode(message) for message in messages] == events
    assert store.read_log(claimed.task_id) == events


def test_a_task_ended_by_a_script_has_the_same_form(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    with redis_client.pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(keys.channel(claimed.task_id))
        pubsub.get_message(timeout=1)
        store.cancel(claimed.task_id)
        message = pubsub.get_message(timeout=60)

    assert message
    assert encode(decode(message["data"])).encode() == message["data"]


def test_an_encoded_event_is_one_line_of_json() -> None:
    for seq, entry in enumerate(ENTRIES):
        text = encode(entry.to_event("t", seq))
        assert "\n" not in text
        assert "\r" not in text
        assert json.loads(text)["seq"] == seq


@pytest.mark.parametrize(
    "entry",
    [LogEntry("x", '"a"'), LogEntry("1", "a"), LogEntry("", '"a"'), LogEntry("1", '"a"', "0", '"logprobs":')],
    ids=["token", "text", "end without a reason", "members"],
)
def test_an_entry_of_another_format_is_a_protocol_error(entry: LogEntry) -> None:
    with pytest.raises(ProtocolError):
        entry.to_event("t", 0)


@pytest.mark.parametrize("message", ["", "[]", "{}", '{"id":"t","seq":0,"index":0,"text":"","token":null}'])
def test_a_message_of_another_format_is_a_protocol_error(message: str) -> None:
    with pytest.raises(ProtocolError):
        decode(message)


def test_a_message_of_a_newer_type_is_known_by_its_seq() -> None:
    message = '{"v":1,"id":"t","seq":4,"weather":"sunny"}'

    assert decode_any(message) == UnknownEvent(id="t", seq=4)
    with pytest.raises(ProtocolError, match="not an event of this version"):
        decode(message)


def test_a_message_of_another_version_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="version 2"):
        decode_any('{"v":2,"id":"t","seq":4}')


def test_a_request_survives_its_payload() -> None:
    request = GenerateRequest(
        id="t", model="m", prompt_token_ids=(1, 2), sampling={"n": 2}, timeout_seconds=5
    )

    assert GenerateRequest.from_payload(json.loads(json.dumps(request.to_payload()))) == request


@pytest.mark.parametrize("payload", [None, {}, {"id": "t", "model": "m"}, {"id": "t", "model": "m", "x": 1}])
def test_a_payload_of_another_format_is_a_protocol_error(payload: object) -> None:
    with pytest.raises(ProtocolError):
        GenerateRequest.from_payload(payload)
