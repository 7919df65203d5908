"""Responses on a real Redis, with a stand-in for the worker."""

import json
from typing import Any

import pytest

from tests.api.api_client import ApiClient, ApiReply
from tests.api.conftest import HandWorker
from tests.api.openai.calling import answering, call

PATH = "/v1/responses"
BACKGROUND = {"input": "hello", "background": True}


def events(reply: ApiReply) -> list[Any]:
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]


def test_a_background_response_is_polled(client: ApiClient, worker: HandWorker) -> None:
    body = {**BACKGROUND, "instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 9}
    created = client.post(PATH, json=body).json
    assert (created["status"], created["output"], created["background"]) == ("queued", [], True)

    worker.run("Hel", "lo")
    ended = client.get(f"{PATH}/{created['id']}").json
    assert (ended["status"], ended["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    assert (ended["usage"]["input_tokens"], ended["usage"]["output_tokens"]) == (3, 2)
    assert (ended["instructions"], ended["metadata"], ended["max_output_tokens"]) == (
        "Be brief.",
        {"a": "b"},
        9,
    )


def test_a_response_that_waits(client: ApiClient, worker: HandWorker) -> None:
    reply = call(client, worker, PATH, {"input": "hello"}, answering("a", reason="length"))
    assert (reply.json["status"], reply.json["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip


def test_a_stream_resumes_at_every_event(client: ApiClient, worker: HandWorker) -> None:
    whole = events(call(client, worker, PATH, {**BACKGROUND, "stream": True}, answering("a", "b", "c")))
    numbers = [event["sequence_number"] for event in whole]
    assert numbers == sorted(set(numbers))
    kinds = [event["type"] for event in whole]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    path = f"{PATH}/{whole[0]['response']['id']}"
    for number in (-1, *numbers):
        after = events(client.get(f"{path}?stream=true&starting_after={number}"))
        assert after == [event for event in whole if event["sequence_number"] > number]


def test_a_response_is_cancelled(client: ApiClient) -> None:
    created = client.post(PATH, json=BACKGROUND).json
    assert client.post(f"{PATH}/{created['id']}/cancel").json["status"] == "cancelled"
    assert client.get(f"{PATH}/resp_{'0' * 32}").status_code in (404, 410)


def test_a_response_continues_another(client: ApiClient, worker: HandWorker) -> None:
    first = client.post(PATH, json={**BACKGROUND, "instructions": "one"}).json
    again = {**BACKGROUND, "input": "more", "instructions": "two", "previous_response_id": first["id"]}
    assert client.post(PATH, json=again).json["error"]["param"] == "previous_response_id"
    worker.run("hi")
    client.post(PATH, json=again)
    (task_id,) = worker.claim()
    turns = [(turn["role"], turn["content"]) for turn in worker.request(task_id).messages or ()]
    assert turns == [("system", "two"), ("user", "hello"), ("assistant", "hi"), ("user", "more")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"n": 2}, "n"),
        ({"store": False, "background": True}, "store"),
        ({"conversation": "x"}, "conversation"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: ApiClient, fields: dict[str, Any], param: str
) -> None:
    reply = client.post(PATH, json={"input": "hello", **fields})
    assert (reply.status_code, reply.json["error"]["param"]) == (400, param), reply.text
