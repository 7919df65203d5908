"""The HTTP client delivers every event once across broken connections, and reports errors precisely."""

import pytest

from tests.conftest import free_port
from tests.tokenmill.cli.fake_service import Answer, FakeService, finished, problem, task, token
from tokenmill.client.http import Broken, Client, Refused, Unreachable
from tokenmill.client.sse import Frame, frames
from tokenmill.protocol.messages import FinishedEvent, TokenEvent


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def client_of(service: FakeService, patience: float = 60.0) -> Client:
    clock = Clock()
    return Client(url=service.url, patience=patience, sleep=clock.sleep, clock=lambda: clock.now)


def texts(client: Client, after: int = -1) -> list[str]:
    return [event.text for event in client.events("t1", after)]


def test_frames_end_at_empty_lines() -> None:
    lines = [b": hello\n", b"\n", b"event: token\r\n", b"id: 4\r\n", b"data: a\r\n", b"data: b\r\n", b"\r\n"]

    assert list(frames(lines)) == [Frame("token", "a\nb", "4")]


def test_an_incomplete_frame_is_dropped() -> None:
    assert list(frames([b"data: whole\n", b"\n", b"data: par", b""])) == [Frame("message", "whole", "")]


def test_each_submission_has_its_own_idempotency_key(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), 202), Answer(task("queued"), 202))
    client = client_of(service)

    client.submit({"prompt": "a"})
    client.submit({"prompt": "a"})

    first, second = (call.headers["idempotency-key"] for call in service.calls)
    assert first != second
    assert service.calls[0].body == {"prompt": "a"}


def test_the_api_key_is_sent_with_each_call_and_never_printed(service: FakeService) -> None:
    service.will_answer(*[Answer(task("queued"), 202)] * 3, Answer([finished(0)]))
    client = Client(url=service.url, api_key="a-secret")

    client.submit({"prompt": "a"})
    client.task("t1")
    client.cancel("t1")
    list(client.events("t1"))

    assert {call.headers["authorization"] for call in service.calls} == {"Bearer a-secret"}
    assert "secret" not in repr(client)


def test_the_api_key_is_not_sent_to_the_target_of_a_redirect(service: FakeService) -> None:
    service.will_answer(Answer({}, 302, {"Location": f"{service.url}/elsewhere"}), Answer(task("queued")))

    Client(url=service.url, api_key="a-secret").task("t1")

    assert ["authorization" in call.headers for call in service.calls] == [True, False]


def test_a_submission_without_a_response_is_repeated_with_its_key(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), 202, breaks=True), Answer(task("queued"), 202))

    assert client_of(service).submit({"prompt": "a"})["id"] == "t1"

    assert len({call.headers["idempotency-key"] for call in service.calls}) == 1


def test_events_are_in_order_and_end_with_the_last_one(service: FakeService) -> None:
    service.will_answer(Answer([token(0, "a"), ": still here\n\n", token(1, "b"), finished(2, text="c")]))

    events = list(client_of(service).events("t1"))

    assert [event.seq for event in events] == [0, 1, 2]
    assert isinstance(events[0], TokenEvent)
    assert isinstance(events[2], FinishedEvent)
    assert "last-event-id" not in service.calls[0].headers


def test_a_broken_stream_resumes_after_its_last_event(service: FakeService) -> None:
    service.will_answer(
        Answer([token(0, "a"), token(1, "b"), "event: token\nid: 2\nda"], breaks=True),
        Answer({}, 503),
        Answer([token(1, "b"), token(2, "c")]),
        Answer([finished(3, text="d")]),
    )

    assert texts(client_of(service)) == ["a", "b", "c", "d"]

    asked = [call.headers.get("last-event-id") for call in service.calls]
    assert asked == [None, "1", "1", "2"]


def test_a_stream_can_start_after_an_event(service: FakeService) -> None:
    service.will_answer(Answer([token(5, "f"), finished(6)]))

    assert texts(client_of(service), after=4) == ["f", ""]
    assert service.calls[0].headers["last-event-id"] == "4"


def test_a_stream_after_the_last_event_is_empty(service: FakeService) -> None:
    service.will_answer(Answer([], 204))

    assert texts(client_of(service), after=6) == []
    assert len(service.calls) == 1


def test_an_event_of_a_newer_version_is_skipped(service: FakeService) -> None:
    service.will_answer(Answer(["event: weather\ndata: {}\n\n", token(0, "a"), finished(1)]))

    assert texts(client_of(service)) == ["a", ""]


def test_an_unknown_task_is_not_retried(service: FakeService) -> None:
    service.will_answer(Answer(problem("task_not_found", "no such task"), 404))

    with pytest.raises(Refused, match="no such task") as raised:
        texts(client_of(service))

    assert (raised.value.status, raised.value.code) == (404, "task_not_found")
    assert len(service.calls) == 1


def test_retries_stop_after_patience(service: FakeService) -> None:
    service.will_answer(*[Answer(problem("store_unavailable", "away"), 503)] * 20)

    with pytest.raises(Refused, match="away"):
        client_of(service, patience=10).wait("t1")

    assert 2 < len(service.calls) < 20


def test_waiting_ends_with_the_task(service: FakeService) -> None:
    service.will_answer(Answer(task("queued")), Answer(task("in_progress")), Answer(task("failed")))

    assert client_of(service).wait("t1")["status"] == "failed"


def test_a_wait_that_returns_early_is_followed_by_a_pause(service: FakeService) -> None:
    """A service without a free thread for waiting calls answers at once."""
    service.will_answer(Answer(task("queued")), Answer(task("completed")))
    slept: list[float] = []
    client = Client(url=service.url, sleep=slept.append, clock=lambda: 0.0)

    assert client.wait("t1")["status"] == "completed"
    assert slept == [1.0]
    assert service.calls[0].path == "/v1/tasks/t1?wait=20"


@pytest.mark.parametrize("retry_after", ["soon", "\xb2"])
def test_an_error_of_a_proxy_is_reported_by_its_status(service: FakeService, retry_after: str) -> None:
    service.will_answer(Answer(["<html>"], 403, {"Retry-After": retry_after}))

    with pytest.raises(Refused, match="HTTP 403"):
        client_of(service).task("t1")


def test_retry_after_is_reported(service: FakeService) -> None:
    service.will_answer(Answer(problem("queue_full", "full"), 429, {"Retry-After": "7"}))

    with pytest.raises(Refused) as raised:
        client_of(service).submit({"prompt": "a"})

    assert raised.value.retry_after == 7


@pytest.mark.parametrize("body", [["no json"], ["[1]"]])
def test_another_server_is_reported_as_unreachable(service: FakeService, body: list[str]) -> None:
    service.will_answer(Answer(body))

    with pytest.raises(Unreachable, match="not Tokenmill"):
        client_of(service).task("t1")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}", "nonsense", "file:///etc/hostname", "http://[::1"]
)
def test_an_address_without_a_server_is_reported_as_unreachable(url: str) -> None:
    with pytest.raises(Unreachable):
        Client(url=url.format(port=free_port())).task("t1")


def test_a_broken_connection_is_reported_as_broken(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), breaks=True))

    with pytest.raises(Broken):
        client_of(service).task("t1")


def test_no_proxy_is_used_for_this_machine(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    service.will_answer(Answer(task("queued")))

    assert client_of(service).task("t1")["id"] == "t1"


def test_a_task_id_is_escaped_in_the_path(service: FakeService) -> None:
    service.will_answer(Answer(problem("task_not_found", "no"), 404))

    with pytest.raises(Refused):
        client_of(service).task("../../admin?x=1")

    assert service.calls[0].path == "/v1/tasks/..%2F..%2Fadmin%3Fx%3D1"


def test_readiness_raises_no_error(service: FakeService) -> None:
    service.will_answer(Answer({}, 200), Answer({}, 503))
    client = client_of(service)

    assert client.is_ready()
    assert not client.is_ready()
    assert not Client(url=f"http://127.0.0.1:{free_port()}").is_ready()
