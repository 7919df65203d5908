"""Chat and text completions on a real Redis, with a stand-in for the worker."""

import json
from dataclasses import replace
from typing import Any

import pytest

from api.schemas.openai.replies import ChatCompletion, Completion
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import CARD, HandWorker, MakeApp
from tests.api.openai.calling import answering, call, chunks
from tokenmill.protocol.messages import LogEntry, TaskError
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def test_a_chat_is_answered_and_its_task_can_be_read(client: ApiClient, worker: HandWorker) -> None:
    body = {**HELLO, "user": "ann", "metadata": {"run": "7"}, "an_unknown_field": [1]}
    reply = call(client, worker, CHAT, body, answering("Hel", "lo"))

    assert reply.status_code == 200, reply.text
    completion = ChatCompletion.model_validate(reply.json, strict=True)
    assert completion.choices[0].message.content == "Hello"
    assert completion.choices[0].finish_reason == "stop"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (3, 2)
    task = client.get(f"/v1/tasks/{reply.headers['X-Task-Id']}").json
    assert completion.id == f"chatcmpl-{task['id']}"
    assert (task["status"], task["metadata"]) == ("completed", {"user": "ann", "run": "7"})


def test_a_chat_is_streamed(client: ApiClient, worker: HandWorker) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    reply = call(client, worker, CHAT, body, answering("Hel", "lo", reason="length"))

    assert reply.content_type == "text/event-stream; charset=utf-8"
    *parts, last = chunks(reply)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello"
    assert (deltas[-1], parts[-1]["choices"][0]["finish_reason"]) == ({}, "length")
    assert {part["object"] for part in [*parts, last]} == {"chat.completion.chunk"}
    assert all(part["usage"] is None for part in parts)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)


def test_a_text_is_completed_and_streamed(client: ApiClient, worker: HandWorker) -> None:
    reply = call(client, worker, TEXT, {"prompt": "x"}, answering("a", "b"))
    assert Completion.model_validate(reply.json, strict=True).choices[0].text == "ab"

    parts = chunks(call(client, worker, TEXT, {"prompt": [1, 2], "stream": True}, answering("a", "b")))
    assert "".join(part["choices"][0]["text"] for part in parts) == "ab"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_several_tasks(client: ApiClient, worker: HandWorker, stream: bool) -> None:
    body = {"prompt": ["x", "y", [5]], "stream": stream}
    reply = call(client, worker, TEXT, body, answering("a"))

    texts = ["", "", ""]
    for part in chunks(reply) if stream else [reply.json]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["a", "a", "a"]
    assert len(set(reply.headers["X-Task-Id"].split(", "))) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_echoed_by_each_output(
    client: ApiClient, worker: HandWorker, stream: bool
) -> None:
    def answer(worker: HandWorker, task_id: str) -> None:
        worker.start(task_id)
        for index in (1, 0):
            worker.publish(task_id, LogEntry.of_token(5, "!", index))
        for index in (1, 0):
            worker.publish(task_id, LogEntry.of_end("", "stop", index=index, done=index == 0))

    body = {"prompt": ["x", "y"], "n": 2, "echo": True, "stream": stream}
    reply = call(client, worker, TEXT, body, answer)
    texts = [""] * 4
    for part in chunks(reply) if stream else [reply.json]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["x!", "x!", "y!", "y!"]
    refused = client.post(TEXT, json={**body, "logprobs": 0})
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "echo")
    assert client.post(CHAT, json={**HELLO, "echo": True}).json["error"]["param"] == "echo"


@pytest.mark.parametrize("stream", [False, True])
def test_the_format_of_a_model_that_was_loaded_meanwhile(
    client: ApiClient, worker: HandWorker, store: TaskStore, settings: ApiSettings, stream: bool
) -> None:
    def answer(worker: HandWorker, task_id: str) -> None:
        store.put_model_card(settings.slug, replace(CARD, tool_format="llama3"))
        answering('{"name": "f", "parameters": {"x": 1}}')(worker, task_id)

    tools = [{"type": "function", "function": {"name": "f"}}]
    reply = call(client, worker, CHAT, {**HELLO, "tools": tools, "stream": stream}, answer)
    parts = [part["choices"][0]["delta"] for part in chunks(reply)] if stream else (
        [reply.json["choices"][0]["message"]]
    )  # fmt: skip
    made = [one["function"] for part in parts for one in part.get("tool_calls", [])]
    assert "".join(function.get("name", "") for function in made) == "f"
    assert json.loads("".join(function["arguments"] for function in made)) == {"x": 1}


def test_continuous_usage(client: ApiClient, worker: HandWorker) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    parts = chunks(call(client, worker, CHAT, body, answering("a", "b")))
    assert parts[-1]["usage"]["total_tokens"] == 5
    assert all(part["usage"]["total_tokens"] <= 5 for part in parts)


def test_logprobs_have_openais_form(client: ApiClient, worker: HandWorker) -> None:
    token = {"logprob": -0.5, "token": "a", "bytes": [97]}
    members = {"logprobs": {**token, "top": [{"id": 9, "logprob": -0.1, "token": "b", "bytes": [98]}]}}

    def answer(worker: HandWorker, task_id: str) -> None:
        worker.start(task_id)
        worker.publish(task_id, LogEntry.of_token(5, "a", members=members))
        worker.finish(task_id)

    body = {**HELLO, "logprobs": True, "top_logprobs": 1}
    content = call(client, worker, CHAT, body, answer).json["choices"][0]["logprobs"]["content"]
    top = {"logprob": -0.1, "token": "b", "bytes": [98]}
    assert content == [{**token, "top_logprobs": [top]}]
    parts = chunks(call(client, worker, CHAT, {**body, "stream": True}, answer))
    assert [one["choices"][0]["logprobs"] for one in parts if one["choices"][0]["logprobs"]] == [
        {"content": content, "refusal": None}
    ]
    text = call(client, worker, TEXT, {"prompt": "x", "logprobs": 1}, answer).json["choices"][0]["logprobs"]
    assert text == {
        "tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"b": -0.1, "a": -0.5}],
        "text_offset": [0],
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "status"), [("invalid_request_error", 400), ("server_error", 500), ("timeout_error", 504)]
)
def test_a_task_that_fails_at_once_is_an_error_reply(
    client: ApiClient, worker: HandWorker, stream: bool, kind: str, status: int
) -> None:
    error = TaskError(type=kind, code="c", message="why", param="messages")

    def answer(worker: HandWorker, task_id: str) -> None:
        worker.finish(task_id, "error", error)

    reply = call(client, worker, CHAT, {**HELLO, "stream": stream}, answer)
    assert reply.status_code == status
    assert {**reply.json["error"], "type": kind} == error.to_json()
    assert reply.headers["X-Task-Id"]


def test_a_task_that_fails_later_ends_its_stream_with_an_error(client: ApiClient, worker: HandWorker) -> None:
    def answer(worker: HandWorker, task_id: str) -> None:
        worker.start(task_id)
        worker.say(task_id, "a")
        worker.finish(task_id, "error", TaskError(type="server_error", code="c", message="why"))

    parts = chunks(call(client, worker, CHAT, {**HELLO, "stream": True}, answer))
    assert parts[-1]["error"]["message"] == "why"


def test_a_task_cancelled_elsewhere_is_a_permanent_conflict(
    client: ApiClient, worker: HandWorker, store: TaskStore
) -> None:
    reply = call(client, worker, CHAT, HELLO, lambda _, task_id: store.cancel(task_id))
    assert (reply.status_code, reply.json["error"]["code"]) == (409, "task_cancelled")
    assert reply.headers["x-should-retry"] == "false"


def test_a_retry_with_the_same_key_gets_the_same_answer(client: ApiClient, worker: HandWorker) -> None:
    headers = {"Idempotency-Key": "k"}
    first = call(client, worker, CHAT, HELLO, answering("a"), headers)
    assert client.post(CHAT, json=HELLO, headers=headers).json == first.json
    assert client.post(CHAT, json={**HELLO, "seed": 1}, headers=headers).status_code == 422


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "response_format",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"stream": 1}, "stream"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: ApiClient, fields: dict[str, Any], param: str
) -> None:
    reply = client.post(CHAT, json={**HELLO, **fields})
    assert (reply.status_code, reply.json["error"]["param"]) == (400, param), reply.text
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_fields_of_other_servers_reach_the_task(
    client: ApiClient, worker: HandWorker, store: TaskStore
) -> None:
    body = {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [], "refusal": None, "annotations": []},
            {"role": "user", "content": "c", "name": "ann"},
        ],
        "max_completion_tokens": 7, "top_k": -1, "min_p": 0.1, "priority": -1, "cache_salt": "s",
        "stop": None, "ignore_eos": True, "logit_bias": {"5": 1}, "response_format": {"type": "json_object"},
        "store": True, "best_of": 1, "modalities": ["text"],
        "chat_template_kwargs": {"enable_thinking": False},
        "service_tier": "auto", "reasoning_effort": "low",
    }  # fmt: skip
    seen: list[Any] = []

    def answer(worker: HandWorker, task_id: str) -> None:
        seen.append(worker.request(task_id))
        answering("{}")(worker, task_id)

    assert call(client, worker, CHAT, body, answer).status_code == 200
    (request,) = seen
    assert [turn["role"] for turn in request.messages] == ["system", "assistant", "user"]
    assert [turn["content"] for turn in request.messages] == ["a\nb", "", "c"]
    assert "tool_calls" not in request.messages[1]
    sampling = dict(request.sampling)
    assert isinstance(sampling.pop("seed"), int)
    assert sampling == {
        "max_tokens": 7, "top_k": 0, "min_p": 0.1, "ignore_eos": True, "logit_bias": {"5": 1.0},
        "structured_outputs": {"json_object": True},
    }  # fmt: skip
    assert (request.priority, request.cache_salt) == (1, "s")
    assert request.chat_template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/models"])
def test_a_key_is_required_where_keys_are_set(make_app: MakeApp, redis_url: str, path: str) -> None:
    client = client_of(make_app(ApiSettings(redis_url=redis_url, api_keys="ann:a-secret-key-of-ann")))
    reply = client.get(path) if path == "/v1/models" else client.post(path, json=HELLO)
    assert (reply.status_code, reply.json["error"]["code"]) == (401, "missing_api_key")


@pytest.mark.parametrize("header", ["api-key", "X-API-Key"])
def test_a_key_may_be_in_the_header_of_other_apis(make_app: MakeApp, redis_url: str, header: str) -> None:
    client = client_of(make_app(ApiSettings(redis_url=redis_url, api_keys="ann:a-secret-key-of-ann")))
    assert client.get("/v1/models", headers={header: "a-secret-key-of-ann"}).status_code == 200
    assert client.get("/v1/models", headers={header: "another"}).status_code == 401
    both = {header: "a-secret-key-of-ann", "Authorization": "Bearer another"}
    assert client.get("/v1/models", headers=both).status_code == 401


def test_a_full_queue_is_a_429_and_cancels_the_prompts_before_it(
    make_app: MakeApp, redis_url: str, store: TaskStore, settings: ApiSettings
) -> None:
    client = client_of(make_app(ApiSettings(redis_url=redis_url, max_waiting_tasks=2)))
    reply = client.post(TEXT, json={"prompt": ["a", "b", "c"]})
    assert (reply.status_code, reply.json["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(reply.headers["Retry-After"]) <= 60
    assert sum(store.queue_stats(settings.slug).waiting.values()) == 0


def test_the_models(client: ApiClient, card: Any) -> None:
    (model,) = client.get("/v1/models").json["data"]
    assert (model["object"], model["max_model_len"]) == ("model", card.max_model_len)
    assert client.get(f"/v1/models/{model['id']}").json == model
    assert client.get("/v1/models/someone/else").json["error"]["code"] == "model_not_found"
    reply = client.post(CHAT, json={**HELLO, "model": "other"})
    assert (reply.status_code, reply.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("given", "priority"), [(0, 2), (None, 2), (-1, 1), (1, 3), (-7, 0), (10**30, 4), (-(2**64), 0)]
)
def test_priorities_have_the_scale_of_vllm(
    client: ApiClient, worker: HandWorker, given: int | None, priority: int
) -> None:
    reply = call(client, worker, CHAT, {**HELLO, "priority": given}, answering("a"))
    assert client.get(f"/v1/tasks/{reply.headers['X-Task-Id']}").json["priority"] == priority


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({"max_tokens": -1}, {}),
        ({"max_completion_tokens": -1, "max_tokens": 5}, {"max_tokens": 5}),
        ({"stop": []}, {"stop": []}),
        ({"logit_bias": {}}, {"logit_bias": {}}),
        (
            {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
            {"structured_outputs": {"json": {"type": "object"}}},
        ),
        ({"response_format": {"type": "text"}}, {}),
    ],
)
def test_spellings_of_other_servers(
    client: ApiClient, worker: HandWorker, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    seen: list[Any] = []

    def answer(worker: HandWorker, task_id: str) -> None:
        seen.append(worker.request(task_id))
        answering("{}")(worker, task_id)

    assert call(client, worker, CHAT, {**HELLO, **fields}, answer).status_code == 200
    (request,) = seen
    assert {name: value for name, value in request.sampling.items() if name != "seed"} == sampling


@pytest.mark.parametrize(
    "path",
    [
        "/chat/completions",
        "/v1/chat/completions/",
        "/v1/v1/chat/completions",
        "/chat/completions/",
        "/openai/v1/chat/completions",
        "/openai/deployments/tiny/chat/completions?api-version=2024-10-21",
    ],
)
def test_a_base_url_with_or_without_its_version(client: ApiClient, worker: HandWorker, path: str) -> None:
    assert call(client, worker, path, HELLO, answering("a")).json["object"] == "chat.completion"


def test_a_path_without_its_version_needs_a_key_too(make_app: MakeApp, redis_url: str) -> None:
    client = client_of(make_app(ApiSettings(redis_url=redis_url, api_keys="ann:a-secret-key-of-ann")))
    assert client.get("/models").status_code == 401
    key = {"Authorization": "Bearer a-secret-key-of-ann"}
    assert client.get("/models/", headers=key).status_code == 200


def test_a_wrong_path_lists_the_routes(client: ApiClient) -> None:
    reply = client.post("/v1/chat/completion", json=HELLO)
    assert reply.status_code == 404
    assert "POST /v1/chat/completions" in reply.json["routes"]
