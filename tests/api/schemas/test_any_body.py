"""Any request gets a status below 500 and valid JSON, and creates a task only if it is accepted."""

import json
from typing import Any

import hypothesis
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from api.json_body import MAX_DEPTH, parse_object
from api.problems import Problem
from api.schemas.requests import TaskBody
from api.submission import body_digest, to_request
from tests.api.api_client import ApiClient
from tokenmill.protocol.messages import GenerateRequest

# Including surrogates, which JSON can encode as escapes.
TEXT = st.text(st.characters(), max_size=8)
NUMBERS = (
    st.integers() | st.floats() | st.sampled_from([0, 1, -1, True, 2**63, 2**64, -(2**63), 10**30, 0.0, 1.0])
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["system", "user", "assistant", "tool", 1]), "content": SCALARS}
    ),
    max_size=3,
)
FIELDS = {
    name: VALUES for name in (*TaskBody.model_fields, "stream", "user") if name not in ("prompt", "messages")
}
BODIES = VALUES | st.fixed_dictionaries(
    {}, optional={**FIELDS, "prompt": TEXT | VALUES, "messages": MESSAGES | VALUES}
)
NUMERIC = [
    "n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "priority",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "prompt_logprobs",
    "queue_timeout_seconds", "ttft_timeout_seconds", "timeout_seconds",
]  # fmt: skip
LIKELY = st.fixed_dictionaries(
    {"prompt": TEXT},
    optional={
        **dict.fromkeys(
            [
                "n",
                "max_tokens",
                "min_tokens",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "seed",
                "priority",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "logprobs",
                "prompt_logprobs",
                "queue_timeout_seconds",
                "ttft_timeout_seconds",
                "timeout_seconds",
            ],
            NUMBERS,
        ),
        **dict.fromkeys(["stop", "bad_words"], TEXT | st.lists(TEXT, max_size=3)),
        **dict.fromkeys(["stop_token_ids", "allowed_token_ids"], st.lists(NUMBERS, max_size=3)),
        **dict.fromkeys(["ignore_eos", "skip_special_tokens"], st.booleans() | st.none()),
        "logit_bias": st.dictionaries(st.integers(-1, 2000).map(str) | TEXT, NUMBERS, max_size=3),
        "structured_outputs": st.dictionaries(
            st.sampled_from(["json", "json_object", "regex", "choice", "grammar"]) | TEXT, VALUES, max_size=2
        ),
        "cache_salt": TEXT,
        "metadata": st.dictionaries(TEXT, VALUES),
    },
)

settings = hypothesis.settings(
    max_examples=150,
    # The database is shared by all examples on purpose: it only grows.
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)


def check(client: ApiClient, redis_client: redis.Redis, body: bytes) -> None:
    jobs = len(redis_client.keys("rq:job:*"))
    reply = client.post("/v1/tasks", data=body, content_type="application/json")
    answer = json.loads(reply.data, parse_constant=pytest.fail)
    assert reply.status_code in (202, 400, 404), reply.text
    assert len(redis_client.keys("rq:job:*")) == jobs + (reply.status_code == 202)
    if reply.status_code == 202:
        assert client.get(f"/v1/tasks/{answer['id']}").status_code == 200
    else:
        assert answer["error"]["message"]


@settings
@given(BODIES | LIKELY)
def test_any_json(client: ApiClient, redis_client: redis.Redis, body: Any) -> None:
    check(client, redis_client, json.dumps(body).encode())


@settings
@given(st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0d8ntf eE+-.19', max_size=40).map(str.encode))
def test_any_bytes(client: ApiClient, redis_client: redis.Redis, body: Any) -> None:
    check(client, redis_client, body)


@settings
@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=20))
def test_any_headers(client: ApiClient, key: str, prefer: Any, request_id: Any) -> None:
    def wire(text: str) -> Any:
        return text.encode("utf-8", "surrogatepass").decode("latin1").translate({10: None, 13: None})

    headers = {"Idempotency-Key": wire(key), "Prefer": wire(prefer), "X-Request-ID": wire(request_id)}
    reply = client.post("/v1/tasks", json={"prompt": "x"}, headers=headers)
    assert reply.status_code in (202, 400, 422)
    client.delete(f"/v1/tasks/{reply.json['id']}" if reply.status_code == 202 else "/")


@settings
@given(VALUES)
def test_accepted_values_can_be_encoded_again(value: Any) -> None:
    body = json.dumps({"metadata": value}).encode()
    try:
        parsed = parse_object(body)
    except Problem:
        return
    again = json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    assert parse_object(again) == parsed


@settings
@given(LIKELY)
def test_a_request_survives_the_queue(body: Any) -> None:
    try:
        task = TaskBody.model_validate(parse_object(json.dumps(body).encode()))
    except (Problem, ValueError):
        return
    request = to_request(task, "a" * 32, "m")
    stored = json.loads(json.dumps(request.to_payload()))
    assert GenerateRequest.from_payload(stored).to_payload() == json.loads(json.dumps(request.to_payload()))
    assert body_digest(task) == body_digest(
        TaskBody.model_validate(task.model_dump(exclude_none=True, by_alias=True))
    )


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, MAX_DEPTH + 1, 900, 10_000, 100_000])
def test_depth_has_a_limit(depth: Any) -> None:
    body = b'{"a": ' + b"[" * depth + b"]" * depth + b"}"
    if depth <= MAX_DEPTH:
        parse_object(body)
    else:
        with pytest.raises(Problem, match="nested deeper"):
            parse_object(body)
