"""Both clients deliver every event once across broken connections, repeat what may be repeated, and report
errors precisely.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.conftest import free_port
from tests.tokenmill.cli.fake_service import Answer, FakeService, finished, problem, task, token
from tests.tokenmill.client.either_client import Clock, sync_client
from tokenmill.client.address import API_KEY_VARIABLE, URL_VARIABLE
from tokenmill.client.async_client import AsyncClient
from tokenmill.client.errors import (
    Broken,
    ClientError,
    Expired,
    InvalidRequest,
    NotAuthenticated,
    NotCompleted,
    NotFound,
    NotTokenmill,
    Refused,
    ServiceFailed,
    TooManyRequests,
    Unreachable,
    WaitTimedOut,
    retry_after,
)
from tokenmill.client.sync_client import Client
from tokenmill.protocol.messages import FinishedEvent, TokenEvent
from tokenmill.settings.declarations import ALL

pytestmark = pytest.mark.usefixtures("clean_environment")

Connect = Callable[..., Any]
AWAY = Answer(problem("store_unavailable", "away"), 503)


def texts(client: Any, after: int = -1) -> list[str]:
    return [event.text for event in client.stream("t1", after=after)]


def test_a_submission_sends_the_fields_that_are_set(service: FakeService, client: Any) -> None:
    service.will_answer(Answer(task("queued"), 202))

    submitted = client.submit("a", max_tokens=5, temperature=0, stop=["x"], seed=None)

    assert (submitted.id, submitted.status, submitted.model) == ("t1", "queued", "tiny")
    assert service.calls[0].body == {"prompt": "a", "max_tokens": 5, "temperature": 0, "stop": ["x"]}


def test_a_reply_keeps_the_fields_of_a_newer_service(service: FakeService, client: Any) -> None:
    sent = task("queued", weather={"sun": 1})
    service.will_answer(Answer(sent))

    found = client.get("t1")

    assert found.weather == {"sun": 1}
    assert found.to_json() == sent


def test_each_submission_has_its_own_idempotency_key(service: FakeService, client: Any) -> None:
    service.will_answer(*[Answer(task("queued"), 202)] * 3)

    client.submit("a")
    client.submit("a")
    client.submit("a", idempotency_key="mine")

    first, second, third = (call.headers["idempotency-key"] for call in service.calls)
    assert first != second
    assert third == "mine"


@pytest.mark.parametrize("answer", [Answer(task("queued"), 202, breaks=True), AWAY, Answer({}, 429)])
def test_a_submission_is_repeated_with_its_key(service: FakeService, client: Any, answer: Answer) -> None:
    service.will_answer(answer, answer, Answer(task("queued"), 202))

    assert client.submit("a").id == "t1"

    assert len(service.calls) == 3
    assert len({call.headers["idempotency-key"] for call in service.calls}) == 1
    assert len({call.headers["x-request-id"] for call in service.calls}) == 1


def test_the_number_of_retries_is_limited(service: FakeService, connect: Connect) -> None:
    service.will_answer(*[AWAY] * 5)

    with pytest.raises(ServiceFailed):
        connect(service.url, max_retries=3).submit("a")

    assert len(service.calls) == 4


def test_the_pauses_grow_and_obey_retry_after(service: FakeService, connect: Connect, clock: Clock) -> None:
    service.will_answer(AWAY, AWAY, Answer({}, 429, {"Retry-After": "17"}), Answer(task("queued"), 202))

    connect(service.url, max_retries=3).submit("a")

    first, second, third = clock.slept
    assert first < second < third == 17


def test_a_longer_retry_after_is_left_to_the_caller(service: FakeService, client: Any) -> None:
    service.will_answer(Answer(problem("queue_full", "full"), 429, {"Retry-After": "61"}))

    with pytest.raises(TooManyRequests) as raised:
        client.submit("a")

    assert raised.value.retry_after == 61
    assert len(service.calls) == 1


@pytest.mark.parametrize(("advice", "status", "num_calls"), [("false", 503, 1), ("true", 400, 2)])
def test_the_advice_of_the_service_to_retry_is_obeyed(
    service: FakeService, connect: Connect, advice: str, status: int, num_calls: int
) -> None:
    service.will_answer(*[Answer(problem("x", "y"), status, {"x-should-retry": advice})] * 2)

    with pytest.raises(Refused):
        connect(service.url, max_retries=1).get("t1")

    assert len(service.calls) == num_calls


def test_the_api_key_is_sent_with_each_call_and_never_printed(service: FakeService, connect: Connect) -> None:
    service.will_answer(*[Answer(task("queued"), 202)] * 3, Answer([finished(0)]))
    client = connect(service.url, "a-secret")

    client.submit("a")
    client.get("t1")
    client.cancel("t1")
    list(client.stream("t1"))

    assert {call.headers["authorization"] for call in service.calls} == {"Bearer a-secret"}
    assert "secret" not in repr(client) + repr(client._transport.address)


def test_address_and_key_come_from_the_environment(
    service: FakeService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_URL", service.url + "/")
    monkeypatch.setenv("TOKENMILL_API_KEY", "a-secret")
    service.will_answer(*[Answer(task("queued"))] * 2)

    connect().get("t1")
    connect(api_key="").get("t1")

    assert [call.headers.get("authorization") for call in service.calls] == ["Bearer a-secret", None]
    assert service.calls[0].path == "/v1/tasks/t1"


def test_the_variables_are_those_of_the_settings() -> None:
    assert {ALL["url"].variable, ALL["api_key"].variable} == {URL_VARIABLE, API_KEY_VARIABLE}


def test_the_default_address_is_that_of_the_service() -> None:
    with Client() as client:
        assert client.base_url == f"http://{ALL['host'].shown_default}:{ALL['port'].shown_default}"


@pytest.mark.parametrize("key", ["a-secret with-more", "a-secret\nX-More: 1", "a-secret-\u20ac"])
def test_a_malformed_key_is_not_repeated(key: str) -> None:
    with pytest.raises(ValueError, match="api_key must be") as raised:
        Client("http://127.0.0.1", key)

    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["nonsense", "file:///etc/hostname", "http://[::1", "http://", "http://a:b"])
def test_a_malformed_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="base_url must be"):
        Client(url)


def test_a_redirect_is_not_followed(service: FakeService, connect: Connect) -> None:
    """The key might be sent to another server, and a POST would become a GET."""
    service.will_answer(Answer({}, 302, {"Location": "http://elsewhere.example"}))

    with pytest.raises(NotTokenmill, match=r"redirects to 'http://elsewhere\.example'"):
        connect(service.url, "a-secret").submit("a")

    assert len(service.calls) == 1


def test_events_are_in_order_and_end_with_the_last_one(service: FakeService, client: Any) -> None:
    service.will_answer(Answer([token(0, "a"), ": still here\n\n", token(1, "b"), finished(2, text="c")]))

    events = list(client.stream("t1"))

    assert [event.seq for event in events] == [0, 1, 2]
    assert isinstance(events[0], TokenEvent)
    assert isinstance(events[2], FinishedEvent)
    assert "last-event-id" not in service.calls[0].headers


def test_a_text_with_separators_of_lines_is_one_event(service: FakeService, client: Any) -> None:
    text = "a\u2028b\x85c\x1cd\re"
    frame = token(0, "TEXT").replace('"TEXT"', f'"{text}"'.replace("\x1c", "\\u001c").replace("\r", "\\r"))
    service.will_answer(Answer([frame, finished(1)]))

    assert texts(client) == [text, ""]


def test_a_broken_stream_resumes_after_its_last_event(service: FakeService, client: Any) -> None:
    service.will_answer(
        Answer([token(0, "a"), token(1, "b"), "event: token\nid: 2\nda"], breaks=True),
        AWAY,
        Answer([token(1, "b"), token(2, "c")]),
        Answer([": only a comment\n\n"]),
        Answer([finished(3, text="d")]),
    )

    assert texts(client) == ["a", "b", "c", "d"]

    asked = [call.headers.get("last-event-id") for call in service.calls]
    assert asked == [None, "1", "1", "2", "2"]


def test_a_stream_can_start_after_an_event(service: FakeService, client: Any) -> None:
    service.will_answer(Answer([token(5, "f"), finished(6)]))

    assert texts(client, after=4) == ["f", ""]
    assert service.calls[0].headers["last-event-id"] == "4"


def test_a_stream_after_the_last_event_is_empty(service: FakeService, client: Any) -> None:
    service.will_answer(Answer([], 204))

    assert texts(client, after=6) == []
    assert len(service.calls) == 1


def test_an_event_of_a_newer_version_is_skipped(service: FakeService, client: Any) -> None:
    """Its `seq` counts: it is no gap, and the stream resumes after it."""
    named = 'event: weather\nid: 0\ndata: {"v": 1, "id": "t1", "seq": 0}\n\n'
    unnamed = 'event: token\nid: 2\ndata: {"v": 1, "id": "t1", "seq": 2, "weather": "sunny"}\n\n'
    aside = "event: weather\ndata: {}\n\n"
    service.will_answer(Answer([named, token(1, "a"), unnamed, aside]), Answer([finished(3)]))

    assert texts(client) == ["a", ""]
    assert service.calls[1].headers["last-event-id"] == "2"


def test_another_version_of_the_protocol_is_an_error(service: FakeService, client: Any) -> None:
    service.will_answer(Answer([token(0, "a").replace('"v": 1', '"v": 2')]))

    with pytest.raises(NotTokenmill, match="version 2 of the protocol, where 1 is expected"):
        texts(client)


def test_a_stream_can_be_left_early(service: FakeService, client: Any) -> None:
    service.will_answer(Answer([token(0, "a"), token(1, "b")]), Answer(task("in_progress")))

    events = client.stream("t1")
    assert next(events).text == "a"
    events.close()

    assert client.get("t1").status == "in_progress"


def test_a_missing_event_is_an_error(service: FakeService, client: Any) -> None:
    service.will_answer(Answer([token(0, "a"), token(2, "c")]))

    with pytest.raises(Broken, match="left out event 1"):
        texts(client)


def test_a_stream_bridges_an_outage_for_as_long_as_its_patience(
    service: FakeService, connect: Connect, clock: Clock
) -> None:
    service.will_answer(Answer([token(0, "a")]), *[AWAY] * 50)
    events = connect(service.url, patience=20).stream("t1")

    assert next(events).text == "a"
    with pytest.raises(ServiceFailed, match="away"):
        next(events)

    assert 15 < clock() <= 20


def test_each_outage_of_a_stream_has_the_whole_patience(service: FakeService, connect: Connect) -> None:
    for seq in range(4):
        service.will_answer(*[AWAY] * 3, Answer([token(seq, str(seq))]))
    service.will_answer(Answer([finished(4)]))

    assert texts(connect(service.url, patience=2)) == ["0", "1", "2", "3", ""]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_value", InvalidRequest),
        (401, "invalid_api_key", NotAuthenticated),
        (404, "task_not_found", NotFound),
        (410, "task_expired", Expired),
        (422, "idempotency_key_reused", InvalidRequest),
        (429, "queue_full", TooManyRequests),
        (503, "busy", ServiceFailed),
    ],
)
def test_each_status_has_its_error(
    service: FakeService, connect: Connect, status: int, code: str, kind: type[Refused]
) -> None:
    service.will_answer(Answer(problem(code, "in its own words"), status, {"X-Request-ID": "call-7"}))

    with pytest.raises(ClientError, match="in its own words") as raised:
        connect(service.url, max_retries=0).get("t1")

    error = raised.value
    assert type(error) is kind
    assert (error.status, error.code, error.request_id) == (status, code, "call-7")
    assert error.message == "in its own words"


def test_the_wrong_field_is_named(service: FakeService, client: Any) -> None:
    body = problem("invalid_value", "x")
    body["error"]["param"] = "max_tokens"
    service.will_answer(Answer(body, 400))

    with pytest.raises(InvalidRequest) as raised:
        client.submit("a", max_tokens=0)

    assert raised.value.param == "max_tokens"


def test_an_unknown_task_is_not_retried(service: FakeService, client: Any) -> None:
    service.will_answer(Answer(problem("task_not_found", "no such task"), 404))

    with pytest.raises(NotFound):
        texts(client)

    assert len(service.calls) == 1


def test_waiting_bridges_an_outage_for_as_long_as_its_patience(
    service: FakeService, connect: Connect, clock: Clock
) -> None:
    service.will_answer(*[AWAY] * 50)

    with pytest.raises(ServiceFailed, match="away"):
        connect(service.url, patience=10).wait("t1")

    assert 5 < clock() <= 10


def test_waiting_ends_with_the_task(service: FakeService, client: Any) -> None:
    service.will_answer(Answer(task("queued")), Answer(task("in_progress")), Answer(task("failed")))

    assert client.wait("t1").status == "failed"


def test_a_poll_that_returns_early_is_followed_by_a_pause(
    service: FakeService, client: Any, clock: Clock
) -> None:
    """A service that is stopping answers at once."""
    service.will_answer(Answer(task("queued")), Answer(task("completed")))

    assert client.wait("t1").status == "completed"
    assert clock.slept == [1.0]
    assert service.calls[0].path == "/v1/tasks/t1?wait=20"


def test_a_service_without_a_free_slot_says_when_to_poll_again(
    service: FakeService, client: Any, clock: Clock
) -> None:
    skipped = {"Tokenmill-Wait": "skipped", "Retry-After": "7"}
    service.will_answer(Answer(task("queued"), headers=skipped), Answer(task("completed")))

    client.wait("t1")

    assert clock.slept == [7.0]


def test_waiting_has_a_timeout(service: FakeService, client: Any, clock: Clock) -> None:
    service.will_answer(*[Answer(task("queued"))] * 4)

    with pytest.raises(WaitTimedOut, match="it continues"):
        client.wait("t1", timeout=2.5)

    assert clock() == 2.5
    assert service.calls[-1].path == "/v1/tasks/t1?wait=0"


def test_a_result_is_a_completed_task(service: FakeService, client: Any) -> None:
    error = {"type": "x", "code": "model_failed", "message": "the step failed", "param": None}
    service.will_answer(
        Answer(task("completed", "Paris.")),
        Answer(task("cancelled", "Pa")),
        Answer(task("failed", error=error)),
    )

    assert client.result("t1").text == "Paris."
    with pytest.raises(NotCompleted, match="the task ended as cancelled") as cancelled:
        client.result("t1")
    with pytest.raises(NotCompleted, match="the step failed") as failed:
        client.result("t1")

    assert cancelled.value.task.text == "Pa"
    assert (cancelled.value.code, failed.value.code) == ("cancelled", "model_failed")


def test_a_task_is_a_handle(service: FakeService, client: Any) -> None:
    service.will_answer(
        Answer(task("queued"), 202),
        Answer([token(0, "Pa"), finished(1, text="ris")]),
        *[Answer(task("completed", "Paris"))] * 4,
    )

    submitted = client.submit("a")

    assert [event.text for event in submitted.stream()] == ["Pa", "ris"]
    assert submitted.refresh().text == submitted.wait().text == submitted.result().text == "Paris"
    assert submitted.cancel().has_ended
    assert not submitted.has_ended
    assert [call.path for call in service.calls] == [
        "/v1/tasks", "/v1/tasks/t1/events", "/v1/tasks/t1", "/v1/tasks/t1?wait=20", "/v1/tasks/t1?wait=20",
        "/v1/tasks/t1/cancel",
    ]  # fmt: skip


def page(ids: range, after: str | None) -> Answer:
    tasks = [{**task("completed"), "id": str(each)} for each in ids]
    return Answer({"object": "list", "data": tasks, "has_more": after is not None, "next": after})


def test_a_list_reads_its_pages_as_needed(service: FakeService, client: Any) -> None:
    service.will_answer(page(range(2), "c1"), page(range(2, 4), "c2"), page(range(4, 5), None))

    found = client.list()
    assert [next(found).id, next(found).id] == ["0", "1"]
    assert len(service.calls) == 1
    assert [each.id for each in found] == ["2", "3", "4"]

    assert [call.path for call in service.calls] == [
        "/v1/tasks?limit=100",
        "/v1/tasks?limit=100&after=c1",
        "/v1/tasks?limit=100&after=c2",
    ]


def test_a_list_has_filters_and_a_limit(service: FakeService, client: Any) -> None:
    service.will_answer(page(range(2), "c1"), page(range(2, 3), "c2"))

    found = client.list(
        limit=3,
        status="queued",
        model="tiny",
        metadata={"user": "a b"},
        created_after=1.5,
        created_before=datetime(1970, 1, 2, tzinfo=UTC),
    )

    assert len(list(found)) == 3
    filters = "status=queued&model=tiny&metadata.user=a+b&created_after=1.5&created_before=86400.0"
    assert [call.path.replace("%20", "+") for call in service.calls] == [
        f"/v1/tasks?limit=3&{filters}",
        f"/v1/tasks?limit=1&after=c1&{filters}",
    ]


def test_a_task_of_a_list_is_a_handle(service: FakeService, client: Any) -> None:
    service.will_answer(page(range(1), None), Answer(task("completed", "Paris")))

    (found,) = client.list()

    assert found.refresh().text == "Paris"


@pytest.mark.parametrize("after", ["soon", "\xb2", ""])
def test_an_error_of_a_proxy_is_reported_by_its_status(service: FakeService, client: Any, after: str) -> None:
    service.will_answer(Answer(["<html>"], 403, {"Retry-After": after}))

    with pytest.raises(NotAuthenticated, match="HTTP 403") as raised:
        client.get("t1")

    assert raised.value.retry_after is None


def test_retry_after_may_be_a_date() -> None:
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:00 GMT"}, now=45.0) == 15.0


@pytest.mark.parametrize("body", [["no json"], ["[1]"], ['{"object": "list"}']])
def test_another_server_is_reported(service: FakeService, client: Any, body: list[str]) -> None:
    service.will_answer(Answer(body))

    with pytest.raises(NotTokenmill, match="not Tokenmill"):
        client.get("t1")


def test_an_address_without_a_server_is_unreachable(connect: Connect, clock: Clock) -> None:
    port = free_port()

    with pytest.raises(Unreachable, match=f"does not answer at http://127.0.0.1:{port}; is it running"):
        connect(f"http://127.0.0.1:{port}").get("t1")

    assert len(clock.slept) == 2


def test_a_broken_connection_is_reported_as_broken(service: FakeService, connect: Connect) -> None:
    service.will_answer(Answer(task("queued"), breaks=True))

    with pytest.raises(Broken) as raised:
        connect(service.url, max_retries=0).get("t1")

    assert raised.value.request_id == service.calls[0].headers["x-request-id"]


def test_no_proxy_is_used_for_this_machine(
    service: FakeService, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    service.will_answer(Answer(task("queued")))

    assert connect(service.url).get("t1").id == "t1"


def test_a_task_id_is_escaped_in_the_path(service: FakeService, client: Any) -> None:
    service.will_answer(Answer(problem("task_not_found", "no"), 404))

    with pytest.raises(NotFound):
        client.get("../../admin?x=1")

    assert service.calls[0].path == "/v1/tasks/..%2F..%2Fadmin%3Fx%3D1"


@pytest.mark.parametrize("task_id", ["", ".", ".."])
def test_an_id_that_would_be_another_path_is_refused(service: FakeService, client: Any, task_id: str) -> None:
    with pytest.raises(ValueError, match="is not the id of a task"):
        client.get(task_id)

    assert service.calls == []


def test_readiness_raises_no_error(service: FakeService, connect: Connect) -> None:
    service.will_answer(Answer({}, 200), Answer({}, 503))
    client = connect(service.url)

    assert client.is_ready()
    assert not client.is_ready()
    assert not connect(f"http://127.0.0.1:{free_port()}").is_ready()


def test_models_are_listed(service: FakeService, client: Any) -> None:
    service.will_answer(Answer({"object": "list", "data": [{"id": "tiny", "object": "model", "created": 1}]}))

    assert [model.id for model in client.models()] == ["tiny"]


def test_a_deletion_says_whether_the_task_is_erased(service: FakeService, client: Any) -> None:
    service.will_answer(Answer([], 204), Answer(task("cancelled")))

    assert client.delete("t1") is True
    assert client.delete("t1") is False
    assert {(call.method, call.path) for call in service.calls} == {("DELETE", "/v1/tasks/t1")}


def test_the_queue_and_the_workers_are_read(service: FakeService, client: Any) -> None:
    queue = {"object": "queue", "model": "tiny", "waiting": 3, "running": 2, "waiting_tokens": 99, "newer": 1}
    worker = {"name": "w1", "model": "tiny", "state": "ready", "running": 2, "waiting": 0, "max_num_seqs": 8}
    service.will_answer(Answer(queue), Answer({"object": "list", "data": [worker]}))

    found = client.queue()

    assert (found.waiting, found.running, found.oldest_seconds, found.newer) == (3, 2, None, 1)
    assert [(each.name, each.max_num_seqs) for each in client.workers()] == [("w1", 8)]
    assert [call.path for call in service.calls] == ["/v1/queue", "/v1/workers"]


def test_the_submitted_request_is_returned_if_it_is_asked_for(service: FakeService, client: Any) -> None:
    hook = {"url": "http://x", "state": "pending", "attempts": 1, "last_status": 500, "next_attempt_at": 5.5}
    service.will_answer(Answer(task("queued", request={"prompt": "a"}, webhook=hook)))

    found = client.get("t1", include_prompt=True)

    assert service.calls[0].path == "/v1/tasks/t1?include=prompt"
    assert found.request == {"prompt": "a"}
    assert (found.webhook.state, found.webhook.last_status) == ("pending", 500)


def test_a_server_that_does_not_answer_is_reported_as_broken(connect: Connect) -> None:
    """It accepts connections, and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = connect(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=0.05, max_retries=1)

        with pytest.raises(Broken, match=r"no answer from .* in time"):
            client.submit("a")


def test_an_http_client_of_the_caller_is_used_and_stays_open(clock: Clock) -> None:
    found = task("completed", "Paris")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=found))
    with httpx.Client(transport=transport) as http:
        with sync_client(clock, "https://service.example", http_client=http) as client:
            assert client.get("t1").text == "Paris"
        assert not http.is_closed


def test_an_asynchronous_http_client_of_the_caller_is_used_and_stays_open() -> None:
    found = task("completed", "Paris")
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=found))

    async def get() -> None:
        async with httpx.AsyncClient(transport=transport) as http:
            async with AsyncClient("https://service.example", http_client=http) as client:
                assert (await client.get("t1")).text == "Paris"
            assert not http.is_closed

    asyncio.run(get())


def test_a_cancelled_coroutine_closes_its_stream(service: FakeService) -> None:
    """Its connection is free again: a client with one connection continues."""
    service.will_answer(Answer([token(0, "a"), ": more\n\n"], breaks=True), Answer(task("in_progress")))

    async def follow(client: AsyncClient) -> None:
        async with aclosing(client.stream("t1")) as stream:
            async for _ in stream:
                raise asyncio.CancelledError

    async def check() -> None:
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=1)) as http:
            client = AsyncClient(service.url, http_client=http)
            with pytest.raises(asyncio.CancelledError):
                await follow(client)
            assert (await client.get("t1")).status == "in_progress"

    asyncio.run(check())
