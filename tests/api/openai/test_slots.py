"""Streams of the OpenAI-compatible routes hold a slot until they end."""

from typing import Any

import pytest

from tests.api.api_client import ApiClient, ApiReply, client_of
from tests.api.conftest import MakeApp
from tokenmill.settings.declarations import ApiSettings

MESSAGES = [{"role": "user", "content": "hello"}]
STREAMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    ("/v1/completions", {"prompt": "hello", "stream": True}),
    ("/v1/responses", {"input": "hello", "stream": True}),
    ("/v1/responses", {"input": "hello", "stream": True, "background": True}),
]


@pytest.fixture
def one_stream(make_app: MakeApp, redis_url: str) -> ApiClient:
    """A service with one slot for streams, which begin after a moment without a token."""
    settings = ApiSettings(redis_url=redis_url, max_streams=1)
    return client_of(make_app(settings.model_copy(update={"heartbeat_seconds": 0.05})))


def num_open(client: ApiClient) -> float:
    lines = client.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("tokenmill_http_streams_open ")]
    return float(line.split()[1])


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_holds_a_slot_until_it_is_closed(
    one_stream: ApiClient, path: str, body: dict[str, Any]
) -> None:
    stream: ApiReply = one_stream.post(path, json=body, buffered=False)
    assert num_open(one_stream) == 1
    for refused_path, refused_body in STREAMS:
        refused = one_stream.post(refused_path, json=refused_body)
        assert (refused.status_code, refused.json["error"]["code"]) == (503, "too_many_streams")
        assert int(refused.headers["Retry-After"]) >= 1
    stream.close()
    assert num_open(one_stream) == 0


def test_a_refused_stream_leaves_no_task(one_stream: ApiClient, redis_client: Any) -> None:
    stream: ApiReply = one_stream.post("/v1/responses", json=STREAMS[3][1], buffered=False)
    jobs = len(redis_client.keys("rq:job:*"))
    for path, body in STREAMS:
        one_stream.post(path, json=body)
    assert len(redis_client.keys("rq:job:*")) == jobs
    stream.close()


def test_head_holds_no_slot(one_stream: ApiClient) -> None:
    response_id = one_stream.post("/v1/responses", json={"input": "hello", "background": True}).json["id"]
    for _ in range(3):
        reply = one_stream.head(f"/v1/responses/{response_id}?stream=true")
        assert (reply.status_code, reply.data) == (200, b"")
    assert num_open(one_stream) == 0
