"""A load: what is sent, what is counted, and what each failure is called."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.tokenmill.bench.scripted_server import Scripted, ScriptedServer, chat, completion, data, running
from tokenmill.bench.backends import OpenAIChat, OpenAICompletions, TokenmillTasks
from tokenmill.bench.load import LoadShape, run_load
from tokenmill.bench.outcomes import Load
from tokenmill.bench.prompts import Lengths, Request, synthetic

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def run(backend: Any, url: str, *requests: Request, **shape: Any) -> Load:
    wanted = LoadShape(**{"concurrency": 2, "num_requests": len(requests), **shape})
    return asyncio.run(
        run_load(wanted, backend(url=url, model="m", fields={"temperature": 0}), iter(requests))
    )


def always(*pieces: bytes, **more: Any) -> ScriptedServer:
    return ScriptedServer(lambda *_: Scripted(list(pieces), **more))


def test_a_completion_is_counted_by_the_servers_usage() -> None:
    with running(always(*completion(["a", "b c"], USAGE))) as server:
        (outcome,) = run(OpenAICompletions, server.url, Request("hi", 3)).outcomes
    assert (outcome.error, outcome.prompt_tokens, outcome.num_tokens) == (None, 5, 3)
    assert len(outcome.times) == 2
    assert outcome.started <= outcome.times[0] <= outcome.times[1] <= outcome.ended
    method, path, headers, body = server.calls[0]
    assert (method, path, headers["accept-encoding"]) == ("POST", "/v1/completions", "identity")
    assert body == {
        "model": "m", "prompt": "hi", "max_tokens": 3, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0,
    }  # fmt: skip


def test_without_usage_pieces_are_counted() -> None:
    with running(always(*completion(["a", "b", "c"], None))) as server:
        (outcome,) = run(OpenAICompletions, server.url, Request("hi", 3)).outcomes
    assert (outcome.output_tokens, outcome.num_tokens) == (None, 3)


def test_the_first_delta_of_a_chat_is_no_token() -> None:
    with running(always(*chat(["a", "b"], USAGE))) as server:
        (outcome,) = run(OpenAIChat, server.url, Request("hi", 3)).outcomes
    assert (len(outcome.times), outcome.num_tokens) == (2, 3)
    assert server.calls[0][3]["messages"] == [{"role": "user", "content": "hi"}]


def test_events_may_be_cut_anywhere() -> None:
    whole = b"".join(completion(["a", "b"], USAGE))
    with running(always(*(whole[at : at + 7] for at in range(0, len(whole), 7)))) as server:
        (outcome,) = run(OpenAICompletions, server.url, Request("hi", 3)).outcomes
    assert (outcome.error, len(outcome.times), outcome.num_tokens) == (None, 2, 3)


def tasks_server(*events: Any) -> ScriptedServer:
    def answer(method: str, path: str, _headers: Any, _body: Any) -> Scripted:
        if (method, path) == ("POST", "/v1/tasks"):
            return Scripted([b'{"id": "t1", "urls": {"events": "/events/t1"}}'], "202 Accepted")
        return Scripted([data(event) for event in events])

    return ScriptedServer(answer)


TOKENS = [{"token": 1, "text": ""}, {"token": 2, "text": "b"}]


def test_a_task_is_followed_by_its_events() -> None:
    end = {"token": None, "done": True, "finish_reason": "length", "usage": USAGE, "error": None}
    with running(tasks_server(*TOKENS, end)) as server:
        (outcome,) = run(TokenmillTasks, server.url, Request([{"role": "user", "content": "x"}], 3)).outcomes
    assert (outcome.error, len(outcome.times), outcome.num_tokens) == (None, 2, 3)
    assert server.calls[0][3] == {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3,
        "on_disconnect": "cancel", "temperature": 0,
    }  # fmt: skip
    assert server.calls[1][:2] == ("GET", "/events/t1")


@pytest.mark.parametrize(
    ("server", "kind", "words"),
    [
        (always(b'{"error": {"message": "no room"}}', status="429 Too Many Requests"), "HTTP 429", "no room"),
        (always(b"busy", status="503 Service Unavailable"), "HTTP 503", "busy"),
        (always(data({"error": {"message": "it broke"}})), "error in the stream", "it broke"),
        (always(*completion(["a"], USAGE)[:1]), "incomplete", "before the text"),
        (always(data(b"{")), "unexpected reply", "cannot be read"),
        (always(data([1])), "unexpected reply", "cannot be read"),
        (always(b"data", cut=True), "RemoteProtocolError", "peer closed"),
    ],
)  # fmt: skip
def test_each_failure_has_a_kind_and_a_message(server: ScriptedServer, kind: str, words: str) -> None:
    with running(server):
        load = run(OpenAICompletions, server.url, Request("hi", 3), Request("ho", 3))
    assert [outcome.error and outcome.error[0] for outcome in load.outcomes] == [kind, kind]
    assert words in str(load.outcomes[0].error)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([{"done": True, "finish_reason": "error", "error": {"code": "oom", "message": "full"}}], "oom"),
        ([{"done": True, "finish_reason": "cancelled", "error": None}], "cancelled"),
        (TOKENS, "incomplete"),
    ],
)
def test_a_task_that_does_not_complete_has_failed(events: list[Any], kind: str) -> None:
    with running(tasks_server(*events)) as server:
        (outcome,) = run(TokenmillTasks, server.url, Request("hi", 3)).outcomes
    assert outcome.error
    assert outcome.error[0] == kind


def test_a_server_that_is_not_there_fails_each_request() -> None:
    load = run(OpenAICompletions, "http://127.0.0.1:9", Request("hi", 3))
    assert load.outcomes[0].error
    assert load.outcomes[0].error[0] == "ConnectError"


def test_no_more_requests_are_open_than_the_concurrency() -> None:
    server = always(*completion(["a"], USAGE))
    server.hold = 3
    with running(server):
        load = run(OpenAICompletions, server.url, *[Request("hi", 3)] * 12, concurrency=3)
    assert len(load.outcomes) == 12
    assert server.most_open == 3


def test_the_warm_up_is_sent_and_not_counted() -> None:
    requests = [Request(str(number), 3) for number in range(5)]
    with running(always(*completion(["a"], USAGE))) as server:
        load = run(OpenAICompletions, server.url, *requests, num_requests=2, warm_up=2, concurrency=1)
    assert [call[3]["prompt"] for call in server.calls] == ["0", "1", "2", "3"]
    assert len(load.outcomes) == 2


def test_no_request_starts_after_the_duration() -> None:
    def endless() -> Iterator[Request]:
        while True:
            yield Request("hi", 3)

    shape = LoadShape(concurrency=2, seconds=0.2)
    with running(always(*completion(["a"], USAGE))) as server:
        backend = OpenAICompletions(url=server.url, model="m")
        load = asyncio.run(run_load(shape, backend, endless()))
    assert load.outcomes
    assert all(outcome.started < 0.2 for outcome in load.outcomes)


def test_arrivals_are_a_poisson_process_of_the_rate_and_the_seed() -> None:
    def first(seed: int, count: int) -> list[float]:
        arrivals = LoadShape(concurrency=None, rate=10, seed=seed).arrivals()
        return [next(arrivals) for _ in range(count)]

    moments = first(1, 4000)
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    assert moments[0] == 0
    assert mean == pytest.approx(0.1, rel=0.1)
    # Of an exponential distribution the deviation is the mean.
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)
    assert moments[:50] == first(1, 50) != first(2, 50)


def test_a_load_that_is_cancelled_returns_what_has_ended() -> None:
    async def cancelled_after_one() -> Load:
        def stop(_: Any) -> None:
            task.cancel()

        shape = LoadShape(concurrency=1)
        requests = synthetic(seed=0, input_lengths=Lengths(2, 2), output_lengths=Lengths(3, 3))
        load = run_load(shape, OpenAICompletions(url=server.url, model="m"), requests, stop)
        task = asyncio.ensure_future(load)
        return await task

    with running(always(*completion(["a"], USAGE))) as server:
        load = asyncio.run(cancelled_after_one())
    assert load.interrupted
    assert len(load.outcomes) >= 1
    assert all(outcome.succeeded for outcome in load.outcomes)
