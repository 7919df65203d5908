"""Server-sent events of a task: replay, live, resumption, limits."""

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import redis

from api.app import ApiApp
from api.streams import sse
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker, MakeApp, Submit
from tokenmill.client.sse import Frame
from tokenmill.client.sse import frames as parse
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent, LogEntry, TaskError, TokenEvent, Usage, decode, encode
from tokenmill.protocol.records import ModelCard
from tokenmill.settings.declarations import ApiSettings


class Stream:
    """A stream read frame by frame, as a client reads it."""

    def __init__(self, client: ApiClient, url: str, **headers: Any) -> None:
        self.reply = client.get(url, headers=headers, buffered=False)
        self._lines = self._split(self.reply.iter_encoded())
        self._frames = parse(self._lines)

    def __iter__(self) -> Any:
        return self._frames

    def next(self, number: int) -> Any:
        return [next(self._frames) for _ in range(number)]

    def close(self) -> None:
        self.reply.close()

    @staticmethod
    def _split(chunks: Any) -> Iterator[Any]:
        for chunk in chunks:
            yield from chunk.splitlines(keepends=True)


def seqs(frames: Any) -> Any:
    return [int(frame.id) for frame in frames]


def text(frames: Any) -> Any:
    return "".join(json.loads(frame.data)["text"] for frame in frames)


@pytest.fixture
def running(submit: Submit, worker: HandWorker) -> Any:
    """A task that a worker has started and that has no token yet."""
    task_id = submit()
    worker.claim()
    worker.start(task_id)
    return task_id


def test_a_finished_task_is_replayed_completely(
    client: ApiClient, submit: Submit, worker: HandWorker
) -> None:
    """tornado-celery PR59: subscribing after the end hung."""
    task_id = submit()
    worker.run("Hel", "lo\n", "\u2028\U0001f600")
    stream = Stream(client, f"/v1/tasks/{task_id}/events")
    frames = list(stream)
    assert stream.reply.content_type == "text/event-stream; charset=utf-8"
    assert stream.reply.headers["Cache-Control"] == "no-cache"
    assert stream.reply.headers["X-Accel-Buffering"] == "no"
    assert [frame.event for frame in frames] == ["token", "token", "token", "finished"]
    assert seqs(frames) == [0, 1, 2, 3]
    assert text(frames) == "Hello\n\u2028\U0001f600"
    last = json.loads(frames[-1].data)
    assert (last["finish_reason"], last["done"], last["error"]) == ("stop", True, None)
    assert last["usage"]["completion_tokens"] == 3


def test_the_stream_sends_the_published_messages(
    client: ApiClient, running: str, worker: HandWorker, redis_client: redis.Redis
) -> None:
    """The data of a frame is the message of the channel."""
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(f"tokenmill:tok:{running}")
        pubsub.get_message(timeout=5)
        worker.say(running, "a", '"\\\n')
        worker.finish(running)
        published = [pubsub.get_message(timeout=5)["data"].decode() for _ in range(3)]
    frames = list(Stream(client, f"/v1/tasks/{running}/events"))
    assert [frame.data for frame in frames] == published


def test_live_events_follow_past_events(client: ApiClient, running: str, worker: HandWorker) -> None:
    worker.say(running, "a", "b")
    stream = Stream(client, f"/v1/tasks/{running}/events")
    assert text(stream.next(2)) == "ab"
    worker.say(running, "c")
    assert text(stream.next(1)) == "c"
    worker.finish(running)
    assert [frame.event for frame in stream] == ["finished"]


def test_a_stream_may_start_before_the_task(client: ApiClient, submit: Submit, worker: HandWorker) -> None:
    task_id = submit()
    stream = Stream(client, f"/v1/tasks/{task_id}/events")
    assert next(stream._lines) == b"retry: 1000\n"
    worker.run("a", "b")
    assert seqs(stream) == [0, 1, 2]


def test_several_readers_get_all_events(client: ApiClient, running: str, worker: HandWorker) -> None:
    streams = [Stream(client, f"/v1/tasks/{running}/events") for _ in range(3)]
    worker.say(running, "a")
    assert [text(stream.next(1)) for stream in streams] == ["a"] * 3
    streams[0].close()
    late = Stream(client, f"/v1/tasks/{running}/events")
    worker.say(running, "b")
    worker.finish(running)
    assert [seqs(stream) for stream in (streams[1], streams[2], late)] == [[1, 2], [1, 2], [0, 1, 2]]


class TestResuming:
    @pytest.mark.parametrize(
        ("query", "headers", "expected"),
        [
            ("", {}, [0, 1, 2, 3]),
            ("?after=-1", {}, [0, 1, 2, 3]),
            ("?after=1", {}, [2, 3]),
            ("", {"Last-Event-ID": "1"}, [2, 3]),
            ("", {"Last-Event-ID": "-1"}, [0, 1, 2, 3]),
            ("", {"Last-Event-ID": ""}, [0, 1, 2, 3]),
            # A source that reconnects repeats its first URL.
            ("?after=0", {"Last-Event-ID": "2"}, [3]),
        ],
    )
    @pytest.mark.parametrize("finished", [True, False])
    def test_a_stream_resumes_after_a_seq(
        self,
        client: ApiClient,
        running: str,
        worker: HandWorker,
        query: Any,
        headers: Any,
        expected: Any,
        finished: Any,
    ) -> None:
        worker.say(running, "a", "b", "c")
        if finished:
            worker.finish(running)
        stream = Stream(client, f"/v1/tasks/{running}/events{query}", **headers)
        if not finished:
            assert seqs(stream.next(len(expected) - 1)) == expected[:-1]
            worker.finish(running)
            expected = expected[-1:]
        assert seqs(stream) == expected

    def test_after_the_last_event_there_is_no_content(
        self, client: ApiClient, running: str, worker: HandWorker
    ) -> None:
        """Status 204 stops an EventSource."""
        worker.finish(running)
        for after in (0, 5, 10**17):
            reply = client.get(f"/v1/tasks/{running}/events?after={after}")
            assert (reply.status_code, reply.data) == (204, b"")
            assert "Content-Type" not in reply.headers

    def test_a_seq_beyond_the_log_waits_for_the_end(
        self, client: ApiClient, running: str, worker: HandWorker
    ) -> None:
        stream = Stream(client, f"/v1/tasks/{running}/events?after=7")
        next(stream._lines)
        worker.say(running, "a")
        worker.finish(running)
        assert seqs(stream) == []

    @pytest.mark.parametrize("last", ["x", "-2", "1.5", "1e3", "0x1", "9" * 30, "1 2", "\u0661"])
    def test_a_bad_id_is_refused(self, client: ApiClient, running: str, last: Any) -> None:
        reply = client.get(
            f"/v1/tasks/{running}/events", headers={"Last-Event-ID": last.encode().decode("latin1")}
        )
        assert (reply.status_code, reply.json["error"]["param"]) == (400, "Last-Event-ID")

    @pytest.mark.parametrize("after", ["x", "-2", "1.5", "", "true", "[]"])
    def test_a_bad_after_is_refused(self, client: ApiClient, running: str, after: int) -> None:
        reply = client.get(f"/v1/tasks/{running}/events?after={after}")
        assert (reply.status_code, reply.json["error"]["param"]) == (400, "after")


def test_a_stream_survives_the_loss_of_every_connection(
    client: ApiClient, running: str, worker: HandWorker, redis_client: redis.Redis
) -> None:
    """redis-py#1573: after a reconnect a subscriber received nothing, and messages meanwhile were lost."""
    stream = Stream(client, f"/v1/tasks/{running}/events")
    got = []
    for word in "abcdef":
        worker.say(running, word)
        got += stream.next(1)
        redis_client.client_kill_filter(_type="pubsub")
    worker.finish(running)
    got += list(stream)
    assert seqs(got) == list(range(7))
    assert text(got) == "abcdef"


def test_cancelling_ends_the_stream(client: ApiClient, running: str, worker: HandWorker) -> None:
    stream = Stream(client, f"/v1/tasks/{running}/events")
    worker.say(running, "a")
    stream.next(1)
    client.delete(f"/v1/tasks/{running}")
    (last,) = stream
    assert json.loads(last.data)["finish_reason"] == "cancelled"


class TestFaults:
    """llama.cpp#14566, mistral.rs#1874, vllm PR40986: a fault showed as an empty success, or the stream of it
    never closed, and a bad input was answered with 200 and a stream.
    """

    ERROR = TaskError(type="server_error", code="engine_error", message="it broke")

    @pytest.mark.parametrize("words", [[], ["a", "b", "c"]], ids=["before-the-first-token", "after-three"])
    @pytest.mark.parametrize("live", [True, False], ids=["live", "replayed"])
    def test_an_error_is_the_only_end_of_a_stream(
        self, client: ApiClient, running: str, worker: HandWorker, words: Any, live: Any
    ) -> None:
        """It is sent once, as `error` and never as `stop` or `length`. Then the server closes the stream."""
        stream = Stream(client, f"/v1/tasks/{running}/events") if live else None
        worker.say(running, *words)
        before = stream.next(len(words)) if stream else []
        worker.finish(running, "error", self.ERROR)
        frames = before + list(stream or Stream(client, f"/v1/tasks/{running}/events"))
        assert [frame.event for frame in frames] == ["token"] * len(words) + ["finished"]
        assert text(frames) == "".join(words)
        last = json.loads(frames[-1].data)
        assert (last["finish_reason"], last["done"], last["error"]) == ("error", True, self.ERROR.to_json())
        assert last["usage"]["completion_tokens"] == len(words)
        assert sum("finish_reason" in json.loads(frame.data) for frame in frames) == 1
        assert client.get(f"/v1/tasks/{running}").json["status"] == "failed"

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"prompt_token_ids": [5] * 101, "prompt": None}, "prompt_token_ids"),
            ({"prompt_token_ids": [1000], "prompt": None}, "prompt_token_ids"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"n": 0}, "n"),
            ({"stream": True}, "stream"),
        ],
    )
    def test_a_bad_input_is_refused_before_there_is_a_stream(
        self, client: ApiClient, card: ModelCard, fields: Any, param: Any
    ) -> None:
        body = {name: value for name, value in {"prompt": "hello", **fields}.items() if value is not None}
        reply = client.post("/v1/tasks", json=body, headers={"Accept": "text/event-stream"})
        assert 400 <= reply.status_code < 500
        assert reply.content_type == "application/problem+json"
        assert reply.json["error"]["type"] == "invalid_request_error"
        assert reply.json["error"]["param"] == param

    def test_an_unknown_task_has_no_stream(self, client: ApiClient) -> None:
        reply = client.get(f"/v1/tasks/{'f' * 32}/events", headers={"Accept": "text/event-stream"})
        assert (reply.status_code, reply.content_type) == (404, "application/problem+json")


class TestSlots:
    @pytest.fixture
    def settings(self, redis_url: str) -> Any:
        return ApiSettings(redis_url=redis_url, max_streams=2)

    def test_one_stream_too_many_gets_a_retry_after(self, client: ApiClient, running: str) -> None:
        streams = [Stream(client, f"/v1/tasks/{running}/events") for _ in range(2)]
        for _ in range(2):
            reply = client.get(f"/v1/tasks/{running}/events")
            assert (reply.status_code, reply.json["error"]["code"]) == (503, "too_many_streams")
            assert int(reply.headers["Retry-After"]) >= 1
        assert client.get(f"/v1/tasks/{running}").status_code == 200
        assert b"tokenmill_http_streams_open 2.0" in client.get("/metrics").data
        streams[0].close()
        assert b"tokenmill_http_streams_open 1.0" in client.get("/metrics").data
        Stream(client, f"/v1/tasks/{running}/events").close()
        streams[1].close()
        assert b"tokenmill_http_streams_open 0.0" in client.get("/metrics").data

    def test_head_holds_no_slot(self, client: ApiClient, running: str) -> None:
        for _ in range(5):
            reply = client.head(f"/v1/tasks/{running}/events")
            assert (reply.status_code, reply.data) == (200, b"")
        assert b"tokenmill_http_streams_open 0.0" in client.get("/metrics").data


def test_a_silent_stream_sends_heartbeats(redis_url: str, make_app: MakeApp) -> None:
    settings = ApiSettings(redis_url=redis_url).model_copy(update={"heartbeat_seconds": 0.1})
    client = client_of(make_app(settings))
    task_id = client.post("/v1/tasks", json={"prompt": "x"}).json["id"]
    chunks = client.get(f"/v1/tasks/{task_id}/events", buffered=False).iter_encoded()
    assert [next(chunks) for _ in range(3)] == [b"retry: 1000\n\n", b": \n\n", b": \n\n"]


def test_many_streams_at_once(app: ApiApp, submit: Submit, worker: HandWorker) -> None:
    """Every stream gets every event of its task, in order."""
    ids = [submit(priority=0) for _ in range(12)]
    assert sorted(worker.claim(12)) == sorted(ids)
    got: dict[tuple[str, int], list[Frame]] = {}

    def read(task_id: str, reader: Any) -> None:
        got[task_id, reader] = list(Stream(client_of(app), f"/v1/tasks/{task_id}/events"))

    threads = [threading.Thread(target=read, args=(task_id, i)) for task_id in ids for i in range(2)]
    for thread in threads:
        thread.start()
    for word in range(30):
        for task_id in ids:
            worker.say(task_id, f"{word} ")
    for task_id in ids:
        worker.finish(task_id)
    for thread in threads:
        thread.join()
    assert len(got) == 24
    for frames in got.values():
        assert seqs(frames) == list(range(31))
        assert text(frames) == "".join(f"{word} " for word in range(30))


def test_frames_are_named_by_event_type() -> None:
    token = TokenEvent(id="a", seq=0, token=5, text="x")
    end = FinishedEvent(id="a", seq=1, text="", finish_reason="stop", index=1)
    done = FinishedEvent(id="a", seq=2, text="", finish_reason="stop", done=True, usage={"prompt_tokens": 1})
    names = [frame.event for frame in parse(sse.frames([token, end, done]).splitlines(keepends=True))]
    assert names == ["token", "end", "finished"]


@pytest.mark.parametrize(
    "entry",
    [
        LogEntry.of_token(5, "\r\n\t\u2028\x00\x7f\U0001f600", index=2),
        LogEntry.of_end("held", "length", index=1, done=False),
        LogEntry.of_end("", "stop", usage=Usage(prompt_tokens=1, completion_tokens=2)),
    ],
)
def test_a_frame_carries_its_message_on_one_line(entry: Any) -> None:
    message = encode(entry.to_event("a", 7))
    event = decode(message)
    assert encode(event) == message
    frame = sse.frame(event)
    assert all(before != after for before, after in pairwise(frame.splitlines()))
    assert len(frame.split(b"\n")) == 5
    assert b"\r" not in frame


def test_a_log_that_cannot_be_read_ends_the_stream_with_an_error(
    client: ApiClient, running: str, worker: HandWorker, redis_client: redis.Redis
) -> None:
    """Unlike an outage, which a stream waits for. Before, it stayed open in silence."""
    stream = Stream(client, f"/v1/tasks/{running}/events")
    worker.say(running, "a")
    assert seqs(stream.next(1)) == [0]
    redis_client.delete(keys.log(running))
    redis_client.set(keys.log(running), "x")
    # A lost connection makes the reader look at the log.
    redis_client.client_kill_filter(_type="pubsub")
    (frame,) = stream
    assert frame.event == "error"
    assert json.loads(frame.data)["code"] == "internal_error"
