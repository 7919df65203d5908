"""The HTTP client: nothing of a stream is lost or told twice, whatever breaks; errors say what was wrong."""

import pytest

from tests.tokenmill.cli.fake_service import Answer, FakeService, finished, problem, task, token
from tokenmill.client.http import Broken, Client, Refused, Unreachable
from tokenmill.client.sse import Frame, frames
from tokenmill.protocol.messages import FinishedEvent, TokenEvent
from tokenmill.serve.embedded_redis import free_port


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def client_of(service: FakeService, patience: float = 60.0) -> Client:
    clock = Clock()
    return Client(url=service.url, patience=patience, sleep=clock.sleep, clock=lambda: clock.now)


def texts(client: Client, after: int = -1) -> list[str]:
    return [event.text for event in client.events("t1", after)]


def test_frames_are_cut_at_empty_lines() -> None:
    lines = [b": hello\n", b"\n", b"event: token\r\n", b"id: 4\r\n", b"data: a\r\n", b"data: b\r\n", b"\r\n"]

    assert list(frames(lines)) == [Frame("token", "a\nb", "4")]


def test_a_frame_that_was_cut_off_is_dropped() -> None:
    assert list(frames([b"data: whole\n", b"\n", b"data: par", b""])) == [Frame("message", "whole", "")]


def test_a_submission_carries_a_key_of_its_own(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), 202), Answer(task("queued"), 202))
    client = client_of(service)

    client.submit({"prompt": "a"})
    client.submit({"prompt": "a"})

    first, second = (call.headers["idempotency-key"] for call in service.calls)
    assert first != second
    assert service.calls[0].body == {"prompt": "a"}


def test_a_key_is_shown_with_each_call_and_never_printed(service: FakeService) -> None:
    service.will_answer(*[Answer(task("queued"), 202)] * 3, Answer([finished(0)]))
    client = Client(url=service.url, api_key="a-secret")

    client.submit({"prompt": "a"})
    client.task("t1")
    client.cancel("t1")
    list(client.events("t1"))

    assert {call.headers["authorization"] for call in service.calls} == {"Bearer a-secret"}
    assert "secret" not in repr(client)


def test_a_key_is_not_shown_to_whom_a_call_is_sent_on(service: FakeService) -> None:
    service.will_answer(Answer({}, 302, {"Location": f"{service.url}/elsewhere"}), Answer(task("queued")))

    Client(url=service.url, api_key="a-secret").task("t1")

    assert ["authorization" in call.headers for call in service.calls] == [True, False]


def test_a_submission_whose_answer_was_lost_is_sent_again_under_its_key(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), 202, breaks=True), Answer(task("queued"), 202))

    assert client_of(service).submit({"prompt": "a"})["id"] == "t1"

    assert len({call.headers["idempotency-key"] for call in service.calls}) == 1


def test_events_come_in_order_until_the_terminal_one(service: FakeService) -> None:
    service.will_answer(Answer([token(0, "a"), ": still here\n\n", token(1, "b"), finished(2, text="c")]))

    events = list(client_of(service).events("t1"))

    assert [event.seq for event in events] == [0, 1, 2]
    assert isinstance(events[0], TokenEvent)
    assert isinstance(events[2], FinishedEvent)
    assert "last-event-id" not in service.calls[0].headers


def test_a_broken_stream_goes_on_after_its_last_event(service: FakeService) -> None:
    service.will_answer(
        Answer([token(0, "a"), token(1, "b"), "event: token\nid: 2\nda"], breaks=True),
        Answer({}, 503),
        Answer([token(1, "b"), token(2, "c")]),
        Answer([finished(3, text="d")]),
    )

    assert texts(client_of(service)) == ["a", "b", "c", "d"]

    asked = [call.headers.get("last-event-id") for call in service.calls]
    assert asked == [None, "1", "1", "2"]


def test_reading_can_start_later(service: FakeService) -> None:
    service.will_answer(Answer([token(5, "f"), finished(6)]))

    assert texts(client_of(service), after=4) == ["f", ""]
    assert service.calls[0].headers["last-event-id"] == "4"


def test_nothing_is_left_to_read_of_a_task_that_has_ended(service: FakeService) -> None:
    service.will_answer(Answer([], 204))

    assert texts(client_of(service), after=6) == []
    assert len(service.calls) == 1


def test_an_event_of_a_later_version_is_passed_over(service: FakeService) -> None:
    service.will_answer(Answer(["event: weather\ndata: {}\n\n", token(0, "a"), finished(1)]))

    assert texts(client_of(service)) == ["a", ""]


def test_an_unknown_task_is_not_asked_for_again(service: FakeService) -> None:
    service.will_answer(Answer(problem("task_not_found", "no such task"), 404))

    with pytest.raises(Refused, match="no such task") as raised:
        texts(client_of(service))

    assert (raised.value.status, raised.value.code) == (404, "task_not_found")
    assert len(service.calls) == 1


def test_patience_ends(service: FakeService) -> None:
    service.will_answer(*[Answer(problem("store_unavailable", "away"), 503)] * 20)

    with pytest.raises(Refused, match="away"):
        client_of(service, patience=10).wait("t1")

    assert 2 < len(service.calls) < 20


def test_waiting_ends_with_the_task(service: FakeService) -> None:
    service.will_answer(Answer(task("queued")), Answer(task("in_progress")), Answer(task("failed")))

    assert client_of(service).wait("t1")["status"] == "failed"


def test_a_wait_that_is_answered_at_once_is_not_repeated_at_once(service: FakeService) -> None:
    """A service without a free place for waiting calls does not wait."""
    service.will_answer(Answer(task("queued")), Answer(task("completed")))
    slept: list[float] = []
    client = Client(url=service.url, sleep=slept.append, clock=lambda: 0.0)

    assert client.wait("t1")["status"] == "completed"
    assert slept == [1.0]
    assert service.calls[0].path == "/v1/tasks/t1?wait=20"


def test_an_error_of_a_proxy_is_told_by_its_status(service: FakeService) -> None:
    service.will_answer(Answer(["<html>"], 403, {"Retry-After": "soon"}))

    with pytest.raises(Refused, match="HTTP 403"):
        client_of(service).task("t1")


def test_retry_after_is_told(service: FakeService) -> None:
    service.will_answer(Answer(problem("queue_full", "full"), 429, {"Retry-After": "7"}))

    with pytest.raises(Refused) as raised:
        client_of(service).submit({"prompt": "a"})

    assert raised.value.retry_after == 7


@pytest.mark.parametrize("body", [["no json"], ["[1]"]])
def test_what_is_not_tokenmill_is_told(service: FakeService, body: list[str]) -> None:
    service.will_answer(Answer(body))

    with pytest.raises(Unreachable, match="not Tokenmill"):
        client_of(service).task("t1")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}", "nonsense", "file:///etc/hostname", "http://[::1"]
)
def test_an_address_where_nothing_answers_is_told(url: str) -> None:
    with pytest.raises(Unreachable):
        Client(url=url.format(port=free_port())).task("t1")


def test_a_broken_connection_is_told_apart(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), breaks=True))

    with pytest.raises(Broken):
        client_of(service).task("t1")


def test_a_proxy_is_not_asked_about_this_machine(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    service.will_answer(Answer(task("queued")))

    assert client_of(service).task("t1")["id"] == "t1"


def test_an_id_cannot_leave_its_place_in_the_path(service: FakeService) -> None:
    service.will_answer(Answer(problem("task_not_found", "no"), 404))

    with pytest.raises(Refused):
        client_of(service).task("../../admin?x=1")

    assert service.calls[0].path == "/v1/tasks/..%2F..%2Fadmin%3Fx%3D1"


def test_readiness_is_a_question_without_errors(service: FakeService) -> None:
    service.will_answer(Answer({}, 200), Answer({}, 503))
    client = client_of(service)

    assert client.is_ready()
    assert not client.is_ready()
    assert not Client(url=f"http://127.0.0.1:{free_port()}").is_ready()
