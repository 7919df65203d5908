"""Responses on a real Redis, with a stand-in for the worker."""

import json
from typing import Any

import pytest

from tests.api.api_client import ApiClient, ApiReply
from tests.api.conftest import HandWorker
from tests.api.openai.calling import answering, call
from tokenmill.protocol.messages import LogEntry

PATH = "/v1/responses"
BACKGROUND = {"input": "hello", "background": True}
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO_CALLS = ("I look.", "\n<tool", "_call>", *CALL.removeprefix("<tool_call>"), "\n", *CALL)
"""A text and two calls, in pieces."""


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


def test_a_response_is_deleted(client: ApiClient, worker: HandWorker) -> None:
    running = client.post(PATH, json=BACKGROUND).json["id"]
    ended = client.post(PATH, json=BACKGROUND).json["id"]
    client.post(f"{PATH}/{ended}/cancel")
    for response_id in (running, ended):
        reply = client.delete(f"{PATH}/{response_id}")
        assert (reply.status_code, reply.json) == (
            200,
            {"id": response_id, "object": "response", "deleted": True},
        )
        assert client.get(f"{PATH}/{response_id}").status_code == 404
        assert client.delete(f"{PATH}/{response_id}").status_code == 404
    assert worker.claim() == []


def test_a_response_is_cancelled(client: ApiClient) -> None:
    created = client.post(PATH, json=BACKGROUND).json
    assert client.post(f"{PATH}/{created['id']}/cancel").json["status"] == "cancelled"
    assert client.get(f"{PATH}/resp_{'0' * 32}").status_code in (404, 410)


def test_a_response_continues_another(client: ApiClient, worker: HandWorker) -> None:
    first = client.post(PATH, json={**BACKGROUND, "instructions": "one"}).json
    more = [{"role": "user", "content": "more", "name": "instructions"}]
    again = {**BACKGROUND, "input": more, "instructions": "two", "previous_response_id": first["id"]}
    assert client.post(PATH, json=again).json["error"]["param"] == "previous_response_id"
    worker.run("hi")
    client.post(PATH, json=again)
    (task_id,) = worker.claim()
    turns = [(turn["role"], turn["content"]) for turn in worker.request(task_id).messages or ()]
    assert turns == [("system", "two"), ("user", "hello"), ("assistant", "hi"), ("user", "more")]
    items = client.get(f"{PATH}/resp_{task_id}/input_items?order=asc").json["data"]
    assert [item["content"][0]["text"] for item in items] == ["hello", "hi", "more"]


def test_calls_are_items(client: ApiClient, worker: HandWorker) -> None:
    created = client.post(PATH, json={**BACKGROUND, "tools": TOOLS, "tool_choice": "auto"}).json
    assert created["tools"] == [{**TOOLS[0], "strict": False}]
    assert (created["tool_choice"], created["parallel_tool_calls"]) == ("auto", True)
    worker.run(*TWO_CALLS)
    message, first, second = client.get(f"{PATH}/{created['id']}").json["output"]
    assert message["content"][0]["text"] == "I look."
    for call_item in (first, second):
        assert (call_item["type"], call_item["name"], call_item["status"]) == (
            "function_call", "weather", "completed",
        )  # fmt: skip
        assert json.loads(call_item["arguments"]) == {"city": "Rome"}
    assert len({first["id"], second["id"], first["call_id"], second["call_id"]}) == 4


def test_a_stream_with_calls_resumes_at_every_event(client: ApiClient, worker: HandWorker) -> None:
    body = {**BACKGROUND, "stream": True, "tools": TOOLS}
    whole = events(call(client, worker, PATH, body, answering(*TWO_CALLS)))
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    kinds = [event["type"] for event in whole]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
    response = whole[-1]["response"]
    assert [event["item"] for event in whole if event["type"] == "response.output_item.done"] == (
        response["output"]
    )
    for index in (1, 2):
        pieces = [
            event["delta"]
            for event in whole
            if event["type"] == "response.function_call_arguments.delta" and event["output_index"] == index
        ]
        assert "".join(pieces) == response["output"][index]["arguments"] == '{"city": "Rome"}'
    assert sum(kind == "response.function_call_arguments.done" for kind in kinds) == 2
    for number in range(-1, len(whole)):
        path = f"{PATH}/{response['id']}?stream=true&starting_after={number}"
        assert events(client.get(path)) == whole[number + 1 :]


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "function", "name": "weather"}, '{"city": "Rome"}'),
        ("required", '[{"name": "weather", "parameters": {"city": "Rome"}}]'),
    ],
)
def test_a_call_that_is_required(client: ApiClient, worker: HandWorker, choice: Any, text: str) -> None:
    # A format is that of a message, and there is none.
    text_format = {"format": {"type": "json_object"}}
    body = {"input": "hello", "tools": TOOLS, "tool_choice": choice, "text": text_format}
    response = call(client, worker, PATH, body, answering(*text)).json
    (item,) = response["output"]
    assert (item["name"], json.loads(item["arguments"])) == ("weather", {"city": "Rome"})
    assert (response["tool_choice"], response["text"]) == (choice, {"format": {"type": "text"}})


def test_calls_and_their_results_are_input(client: ApiClient, worker: HandWorker) -> None:
    first = client.post(PATH, json={**BACKGROUND, "tools": TOOLS}).json
    worker.run(CALL)
    (item,) = client.get(f"{PATH}/{first['id']}").json["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
    reasoning = {"type": "reasoning", "id": "r", "summary": []}

    parts = [{"type": "input_text", "text": "sunny"}]
    for body in (
        {"input": [{"role": "user", "content": "hello"}, reasoning, item, {**result, "output": parts}]},
        {"input": [result], "previous_response_id": first["id"]},
    ):
        client.post(PATH, json={**BACKGROUND, **body, "tools": TOOLS})
        (task_id,) = worker.claim()
        user, assistant, tool = worker.request(task_id).messages or ()
        assert user["content"] == "hello"
        (made,) = assistant["tool_calls"]
        assert (assistant["role"], made["id"]) == ("assistant", item["call_id"])
        assert made["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
        assert (tool["role"], tool["content"], tool["tool_call_id"]) == ("tool", "sunny", item["call_id"])


def test_the_input_is_listed(client: ApiClient, worker: HandWorker) -> None:
    items = [
        {"role": "user", "content": "hello"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"role": "assistant", "content": "fine"},
    ]
    created = client.post(PATH, json={**BACKGROUND, "input": items, "instructions": "Be brief."}).json
    path = f"{PATH}/{created['id']}/input_items"
    whole = client.get(f"{path}?order=asc").json
    user, made, result, answer = whole["data"]
    assert (user["role"], user["content"][0]["text"]) == ("user", "hello")
    assert {**made, **items[1]} == made
    assert {**result, **items[2]} == result
    assert (answer["content"][0]["type"], whole["has_more"]) == ("output_text", False)
    assert client.get(path).json["data"] == whole["data"][::-1]
    page = client.get(f"{path}?limit=3&after={answer['id']}").json
    assert (page["data"], page["last_id"]) == (whole["data"][2::-1], user["id"])
    assert client.get(f"{path}?limit=1").json["has_more"] is True
    assert client.get(f"{path}?after=x").json["error"]["param"] == "after"
    assert client.get(f"{path}?limit=0").status_code == 400


def test_a_task_with_several_outputs_shows_the_first(client: ApiClient, worker: HandWorker) -> None:
    task_id = client.post("/v1/tasks", json={"prompt": "x", "n": 2}).json["id"]
    (claimed,) = worker.claim()
    worker.start(claimed)
    for index in (1, 0):
        worker.publish(claimed, LogEntry.of_token(5, "ab"[index], index))
    worker.publish(claimed, LogEntry.of_end("", "stop", index=1, done=False))
    worker.finish(claimed)
    shown = client.get(f"{PATH}/resp_{task_id}").json
    assert [item["content"][0]["text"] for item in shown["output"]] == ["a"]
    *_, last = events(client.get(f"{PATH}/resp_{task_id}?stream=true"))
    assert (last["type"], last["response"]) == ("response.completed", shown)


def test_logprobs(client: ApiClient, worker: HandWorker) -> None:
    token = {"logprob": -0.5, "token": "a", "bytes": [97]}
    top = {"logprob": -0.1, "token": "b", "bytes": [98]}
    members = {"logprobs": {**token, "top": [{"id": 9, **top}]}}

    def answer(worker: HandWorker, task_id: str) -> None:
        worker.start(task_id)
        worker.publish(task_id, LogEntry.of_token(5, "a", members=members))
        worker.finish(task_id)

    shown = [{**token, "top_logprobs": [top]}]
    for tools in ([], TOOLS):
        body = {"input": "hello", "include": ["message.output_text.logprobs"], "tools": tools}
        response = call(client, worker, PATH, {**body, "top_logprobs": 1}, answer).json
        assert response["output"][0]["content"][0]["logprobs"] == shown
        stream = events(call(client, worker, PATH, {**body, "stream": True}, answer))
        assert [one["logprobs"] for one in stream if one["type"] == "response.output_text.delta"] == [shown]


def test_fields_without_effect_here_are_accepted(client: ApiClient, worker: HandWorker) -> None:
    body = {
        **BACKGROUND, "include": ["reasoning.encrypted_content"], "truncation": "auto",
        "service_tier": "auto", "reasoning": {"effort": "low", "summary": "auto"},
        "tools": [], "tool_choice": "none", "user": "ann",
        "text": {"verbosity": "low"}, "max_tool_calls": 3, "store": True, "prompt_cache_key": "k",
    }  # fmt: skip
    assert client.post(PATH, json=body).status_code == 200
    (task_id,) = worker.claim()
    assert worker.request(task_id).chat_template_kwargs == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": TOOLS}, "tool_choice"),
        ({"include": ["everything"]}, "include"),
        ({"truncation": "middle"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"logprobs": 2}, "logprobs"),
        ({"n": 2}, "n"),
        ({"store": False, "background": True}, "store"),
        ({"conversation": "x"}, "conversation"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"type": ["message"]}]}, "input"),
        ({"input": [7]}, "input"),
        ({"input": {}}, "input"),
        ({"input": []}, "input"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: ApiClient, fields: dict[str, Any], param: str
) -> None:
    reply = client.post(PATH, json={"input": "hello", **fields})
    assert (reply.status_code, reply.json["error"]["param"]) == (400, param), reply.text
