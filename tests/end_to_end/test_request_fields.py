"""Several outputs, logprobs, limits and structured outputs, by HTTP and by stream, with real processes."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.live_service import LiveService, wait_for
from tests.tiny_models import save_model
from tokenmill.client.streams import TokenStream
from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    limits = {"TOKENMILL_DTYPE": "float32", "TOKENMILL_MAX_NUM_SEQS": "8", "TOKENMILL_LEASE_SECONDS": "2"}
    model_dir = save_model(tmp_path_factory.mktemp("model"))
    with LiveService(model_dir, tmp_path_factory.mktemp("service"), limits) as running:
        yield running


def followed(service: LiveService, task_id: str) -> list[Event]:
    """All messages, after checking that there is no gap and that each output ends once."""
    events = list(TokenStream(service.redis_url, task_id))
    assert [event.seq for event in events] == list(range(len(events)))
    ended: set[int] = set()
    for event in events:
        assert event.index not in ended
        if isinstance(event, FinishedEvent):
            ended.add(event.index)
    return events


def sse(service: LiveService, task_id: str) -> list[Any]:
    body = service.call("GET", f"/v1/tasks/{task_id}/events").body.decode()
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]


def test_usage_is_the_same_streamed_polled_and_counted(service: LiveService) -> None:
    """vllm#8625, vllm#7262: two outputs, half characters, and a stop string that hides tokens."""
    asked = {"prompt": "what is the capital", "n": 2, "max_tokens": 24, "seed": 5, "ignore_eos": True}
    free = service.wait_task(service.submit(**asked))
    text = free["outputs"][0]["text"]
    task_id = service.submit(**asked, stop=[text[4:8]])
    task = service.wait_task(task_id)
    events = followed(service, task_id)

    end = events[-1]
    assert isinstance(end, FinishedEvent)
    counted = sum(len(output["token_ids"]) for output in task["outputs"])
    assert end.usage == task["usage"]
    assert task["usage"]["completion_tokens"] == counted
    assert counted == sum(isinstance(event, TokenEvent) for event in events)
    for output in task["outputs"]:
        own = [event for event in events if event.index == output["index"]]
        assert "".join(event.text for event in own) == output["text"]
        assert [event.token for event in own if isinstance(event, TokenEvent)] == output["token_ids"]
    assert task["outputs"][0]["text"] == text[: text.index(text[4:8])]
    assert task["outputs"][0]["finish_reason"] == "stop"
    assert free["outputs"][0]["text"] != free["outputs"][1]["text"], "each output has its own seed"
    assert [message["seq"] for message in sse(service, task_id)] == [event.seq for event in events]


def test_logprobs_stream_poll_and_align(service: LiveService) -> None:
    """vllm#36830: ids and logprobs of a stream drifted apart from its text."""
    asked = {"prompt": "the quick brown", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    task_id = service.submit(**asked, n=2, logprobs=3, prompt_logprobs=1)
    plain = service.wait_task(service.submit(**asked))
    task = service.wait_task(task_id)
    events = followed(service, task_id)

    assert task["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    for output in task["outputs"]:
        own = [event for event in events if isinstance(event, TokenEvent) and event.index == output["index"]]
        assert [event.logprobs for event in own] == output["logprobs"]
        assert len(output["logprobs"]) == len(output["token_ids"]) == 6
        for token_id, logprobs in zip(output["token_ids"], output["logprobs"], strict=True):
            assert logprobs["top"][0]["id"] == token_id, "greedy"
            assert logprobs["logprob"] == logprobs["top"][0]["logprob"] <= 0
            assert len({tuple(one["bytes"]) for one in logprobs["top"]}) == 3
    assert len(task["prompt_logprobs"]) == task["usage"]["prompt_tokens"]
    assert task["prompt_logprobs"][0] is None
    first = sse(service, task_id)[0]
    assert (first["logprobs"], first["prompt_logprobs"]) == (
        task["outputs"][0]["logprobs"][0], task["prompt_logprobs"],
    )  # fmt: skip
    assert (plain["outputs"][0]["logprobs"], plain["prompt_logprobs"]) == (None, None)


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_cancel_ends_each_of_three_outputs(service: LiveService, state: str) -> None:
    long = {"prompt": "one two", "n": 3, "max_tokens": 1500, "ignore_eos": True}
    before = [service.submit(**long) for _ in range(12 if state == "waiting" else 0)]
    task_id = service.submit(**long)
    if state == "running":
        wait_for(lambda: service.task(task_id)["outputs"][2]["token_ids"], "all three run")
    assert service.call("POST", f"/v1/tasks/{task_id}/cancel").json["status"] == "cancelled"

    events = followed(service, task_id)

    assert sorted(event.index for event in events if isinstance(event, FinishedEvent)) == [0, 1, 2]
    task = service.task(task_id)
    assert [output["finish_reason"] for output in task["outputs"]] == ["cancelled"] * 3
    assert task["usage"]["completion_tokens"] == sum(len(one["token_ids"]) for one in task["outputs"])
    for other in before:
        service.call("POST", f"/v1/tasks/{other}/cancel")


def test_time_limits_end_running_and_waiting_tasks(service: LiveService) -> None:
    long = {"prompt": "one two", "max_tokens": 1500, "ignore_eos": True}
    running = service.wait_task(service.submit(**long, n=2, timeout_seconds=0.5))
    crowd = [service.submit(**long) for _ in range(24)]
    waiting = service.wait_task(service.submit(**long, queue_timeout_seconds=0.2))
    for other in crowd:
        service.call("POST", f"/v1/tasks/{other}/cancel")

    for task, name in ((running, "timeout_seconds"), (waiting, "queue_timeout_seconds")):
        assert (task["status"], task["error"]["code"]) == ("failed", "timeout")
        assert name in task["error"]["message"]
        assert {output["finish_reason"] for output in task["outputs"]} == {"timeout"}
    assert waiting["usage"] is None or waiting["usage"]["completion_tokens"] == 0


def test_structured_outputs_are_obeyed(service: LiveService) -> None:
    asked = {"prompt": "the capital is", "max_tokens": 40, "seed": 1}
    chosen = service.wait_task(service.submit(**asked, n=2, structured_outputs={"choice": ["red", "green"]}))
    bad = service.wait_task(service.submit(**asked, structured_outputs={"regex": "("}))

    assert {output["text"] for output in chosen["outputs"]} <= {"red", "green"}
    assert (bad["status"], bad["error"]["param"]) == ("failed", "structured_outputs")


def test_too_many_outputs_are_refused_at_once(service: LiveService) -> None:
    reply = service.call("POST", "/v1/tasks", {"prompt": "x", "n": 10**6})
    assert (reply.status, reply.json["error"]["param"]) == (400, "n")
    reply = service.call("POST", "/v1/tasks", {"prompt": "x", "logit_bias": {"99999": 5}})
    assert (reply.status, reply.json["error"]["param"]) == (400, "logit_bias")
