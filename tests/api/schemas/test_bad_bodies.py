"""Every bad body is refused: 4xx, valid JSON, the field named, quickly, and nothing stored in Redis."""

import gzip
import json
import math
import re
import zlib
from dataclasses import replace
from typing import Any

import pytest
import redis

from api.app import create_app
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker
from tests.conftest import RedisServer
from tokenmill.protocol.records import ModelCard
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

GOOD = {"prompt": "hello", "max_tokens": 4}
SURROGATE = b'"\\ud83d"'


@pytest.fixture(scope="module")
def client(redis_server: RedisServer) -> Any:
    """One application for all tests: no call breaks the next one."""
    return client_of(create_app(ApiSettings(redis_url=redis_server.url)))


def check_refused(
    client: ApiClient, redis_client: redis.Redis, reply: Any, status: int, param: Any = None
) -> None:
    assert reply.status_code == status, reply.text
    assert reply.content_type == "application/problem+json"
    # Python reads NaN as a number, other clients do not: a refusal must not repeat it.
    problem = json.loads(reply.data, parse_constant=pytest.fail)
    assert problem["status"] == status
    assert problem["title"]
    assert problem["detail"] == problem["error"]["message"]
    assert problem["error"]["type"] == "invalid_request_error"
    assert problem["error"]["code"]
    if param is not None:
        assert problem["error"]["param"] == param
        assert param in problem["detail"]
    assert reply.headers["X-Request-ID"] == problem["request_id"]
    assert not [key for key in redis_client.keys("*") if b"idem" in key or b"job" in key or b"queue" in key]
    assert client.post("/v1/tasks", json=GOOD).status_code == 202


@pytest.mark.parametrize(
    ("field", "value"),
    [
        # vllm#19862: a null max_tokens was a 500; here it means "up to the limit", the others are refused.
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("max_tokens", 1.5),
        ("max_tokens", [5]),
        # vllm#1623: a value out of range killed the engine.
        ("temperature", -0.1),
        ("temperature", True),
        ("temperature", "hot"),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", -1),
        ("top_p", 1.01),
        ("top_k", -1),
        ("top_k", True),
        ("top_k", 2.0),
        ("min_p", -0.5),
        ("min_p", 2),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stop", ["x"] * 17),
        ("ignore_eos", 1),
        ("ignore_eos", "true"),
        # vllm#54195: an id outside the vocabulary wrote into another row.
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", 7),
        ("priority", 5),
        ("priority", -1),
        ("priority", True),
        ("model", 5),
        ("metadata", [1]),
        ("metadata", "text"),
        ("metadata", {"text": "x" * 20_000}),
        # The fields of later versions and of other services are not silently ignored.
        ("best_of", 2),
        ("max_new_tokens", 4),
        ("n", 0),
        ("n", 10**6),
        ("n", True),
        ("min_tokens", 5),  # more than max_tokens
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 100}),
        ("logit_bias", {str(n): 1 for n in range(1025)}),
        ("allowed_token_ids", []),
        ("bad_words", ["x"] * 129),
        ("structured_outputs", {}),
        ("structured_outputs", {"regex": "a", "choice": ["a"]}),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", -1),
        ("queue_timeout_seconds", 0),
        ("ttft_timeout_seconds", -1),
        ("timeout_seconds", "5"),
        ("timeout_seconds", 1e12),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_bad_value_is_refused_by_name(
    client: ApiClient, redis_client: redis.Redis, field: str, value: Any
) -> None:
    reply = client.post("/v1/tasks", json={**GOOD, field: value})
    check_refused(client, redis_client, reply, 400)
    assert reply.json["error"]["param"] in (field, f"{field}.0")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        # vllm#7283, llama.cpp#5246: an empty prompt hung the next request.
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["ok", ""]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x", "name": "me"}]}, "messages.0.name"),
        # vllm#26797, llama.cpp#12178: a prompt of invalid token ids.
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids.0"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids.0"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids.1"),
        ({"prompt_token_ids": [[1], [999999]]}, "prompt_token_ids.0"),
        ({"prompt_token_ids": "123"}, "prompt_token_ids"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop.1"),
        ({"prompt": "x", "stop": ["a", 5]}, "stop.1"),
        ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "x", "structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"prompt": "x", "structured_outputs": {"json": '{"minimum": NaN}'}}, "structured_outputs.json"),
        ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"prompt": "x", "structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_input_is_refused_by_name(
    client: ApiClient, redis_client: redis.Redis, body: Any, param: Any
) -> None:
    check_refused(client, redis_client, client.post("/v1/tasks", json=body), 400, param)


@pytest.mark.parametrize(
    "body", [{}, {"max_tokens": 4}, {"prompt": None}, {"prompt": "x", "prompt_token_ids": [1]}]
)
def test_exactly_one_input_is_required(client: ApiClient, redis_client: redis.Redis, body: Any) -> None:
    """vllm#7283: a missing prompt."""
    reply = client.post("/v1/tasks", json=body)
    check_refused(client, redis_client, reply, 400)
    assert "exactly one of prompt, messages and prompt_token_ids" in reply.json["detail"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    "field",
    [
        "temperature", "top_p", "min_p", "max_tokens", "metadata", "presence_penalty", "repetition_penalty",
        "timeout_seconds", "logit_bias",
    ],
)  # fmt: skip
def test_a_number_that_is_not_finite_is_refused(
    client: ApiClient, redis_client: redis.Redis, number: int, field: str
) -> None:
    """vllm PR45116, sglang PR28153: Python's JSON reads NaN, and every comparison with it is false."""
    value = {"metadata": f'{{"deep": [{number}]}}', "logit_bias": f'{{"1": {number}}}'}.get(field, number)
    body = f'{{"prompt": "x", "{field}": {value}}}'
    reply = client.post("/v1/tasks", data=body, content_type="application/json")
    check_refused(client, redis_client, reply, 400)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b"3", b'"{\\"prompt\\": \\"x\\"}"', b"true", b"{} {}", b"{'prompt': 'x'}",
        b'{"prompt": "x", "prompt": "y"}', b"\xff\xfe", b'{"prompt": "\xff"}', "{}".encode("utf-16"),
        b'{"seed": ' + b"1" * 5000 + b"}", b'{"prompt": "a\x00b"}',
    ],
    ids=lambda body: str(body[:20]),
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_refused(
    client: ApiClient, redis_client: redis.Redis, body: Any
) -> None:
    """flask-jwt-extended#74, hashview#212: a null or list body was a 500, a broken one an HTML page."""
    reply = client.post("/v1/tasks", data=body, content_type="application/json")
    check_refused(client, redis_client, reply, 400)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": %s}', "prompt"),
        (b'{"prompt": "x", "stop": %s}', "stop"),
        (b'{"prompt": "x", "stop": ["ok", %s]}', "stop"),
        (b'{"prompt": "x", "model": %s}', "model"),
        (b'{"prompt": "x", "metadata": {"a": %s}}', "metadata"),
        (b'{"prompt": "x", "metadata": {%s: 1}}', "metadata"),
        (b'{"prompt": "x", "metadata": {"a": [{"b": %s}]}}', "metadata"),
        (b'{"messages": [{"role": "user", "content": %s}]}', "messages"),
        (b'{"messages": [{"role": %s, "content": ""}]}', "messages"),
        (b'{"prompt": "x", %s: 1}', "\\ud83d"),
    ],
)
def test_a_lone_surrogate_is_refused(
    client: ApiClient, redis_client: redis.Redis, body: Any, param: Any
) -> None:
    """aider#3693, llama.cpp#25543: JSON may contain half a pair, which no UTF-8 encoder accepts."""
    reply = client.post("/v1/tasks", data=body % SURROGATE, content_type="application/json")
    check_refused(client, redis_client, reply, 400, param)


def test_a_surrogate_pair_is_text(client: ApiClient) -> None:
    reply = client.post("/v1/tasks", data=b'{"prompt": "\\ud83d\\ude00"}', content_type="application/json")
    assert reply.status_code == 202


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", None])
def test_another_content_type_is_refused(
    client: ApiClient, redis_client: redis.Redis, content_type: Any
) -> None:
    """hashview#212: Flask's own answer is an HTML page."""
    reply = client.post("/v1/tasks", data=json.dumps(GOOD), content_type=content_type)
    check_refused(client, redis_client, reply, 415)


BIG = {
    "nested lists": b'{"prompt": "x", "metadata": {"a": ' + b"[" * 10_000 + b"]" * 10_000 + b"}}",
    "nested objects": b'{"prompt": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    "nested a little": b'{"prompt": "x", "metadata": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}",
    "prompts": json.dumps({"prompt": ["x"] * 100_000}).encode(),
    "stop strings": json.dumps({"prompt": "x", "stop": ["a"] * 300_000}).encode(),
    "bad token ids": json.dumps({"prompt_token_ids": ["a"] * 300_000}).encode(),
    "bad messages": json.dumps({"messages": ["a"] * 300_000}).encode(),
    "unknown fields": json.dumps({"prompt": "x", **{f"f{i}": 0 for i in range(100_000)}}).encode(),
    "one field twice": b'{"prompt": "x"' + b', "a": 0' * 100_000 + b"}",
    "long stop": json.dumps({"prompt": "x", "stop": "s" * 1_000_000}).encode(),
    "many biases": json.dumps({"prompt": "x", "logit_bias": {str(i): "a" for i in range(100_000)}}).encode(),
    "bad words": json.dumps({"prompt": "x", "bad_words": [1] * 300_000}).encode(),
    "choices": json.dumps({"prompt": "x", "structured_outputs": {"choice": [1] * 300_000}}).encode(),
    "long schema": json.dumps({"prompt": "x", "structured_outputs": {"json": "[" * 1_000_000}}).encode(),
    "large schema": json.dumps(
        {"prompt": "x", "structured_outputs": {"json": {"enum": list(range(200_000))}}}
    ).encode(),
    "long regex": json.dumps({"prompt": "x", "structured_outputs": {"regex": "a" * 1_000_000}}).encode(),
    "long name": json.dumps({"prompt": "x", "f" * 1_000_000: 1}).encode(),
    "long model": json.dumps({"prompt": "x", "model": "m" * 1_000_000}).encode(),
    "long seed": b'{"prompt": "x", "top_k": -' + b"9" * 4000 + b"}",
}


@pytest.mark.parametrize("name", BIG)
def test_a_small_body_cannot_cause_much_work(client: ApiClient, redis_client: redis.Redis, name: str) -> None:
    """vllm PR37952, PR47845: small bodies that cost much. The reply is always short."""
    reply = client.post("/v1/tasks", data=BIG[name], content_type="application/json")
    check_refused(client, redis_client, reply, 404 if name == "long model" else 400)
    assert len(reply.data) < 2000


def test_a_body_beyond_the_limit_is_refused_unread(
    client: ApiClient, redis_client: redis.Redis, settings: ApiSettings
) -> None:
    """llama.cpp#19367: 50 MB."""
    body = b'{"prompt": "' + b"x" * 50_000_000 + b'"}'
    reply = client.post("/v1/tasks", data=body, content_type="application/json")
    check_refused(client, redis_client, reply, 413, "body")
    assert str(settings.max_body_bytes) in reply.json["detail"]


class TestWithModelCard:
    @pytest.mark.parametrize(
        ("body", "param", "code"),
        [
            # vllm PR9634: ids outside the vocabulary crash the forward pass.
            ({"prompt_token_ids": [1000]}, "prompt_token_ids", "invalid_value"),
            ({"prompt_token_ids": [5279552648203111001]}, "prompt_token_ids", "invalid_value"),
            ({"prompt_token_ids": [2**100]}, "prompt_token_ids", "invalid_value"),
            ({"prompt_token_ids": [10**4000]}, "prompt_token_ids", "invalid_value"),
            ({"prompt_token_ids": [1] * 81}, "prompt_token_ids", "context_length_exceeded"),
            # vllm#54195: a bias for an invalid id wrote into another request's row.
            ({"prompt": "x", "stop_token_ids": [5, 99_999]}, "stop_token_ids", "invalid_value"),
            ({"prompt": "x", "min_tokens": 3, "logit_bias": {"99999": 5}}, "logit_bias", "invalid_value"),
            ({"prompt": "x", "logit_bias": {"1": 1, "1000": 5}}, "logit_bias", "invalid_value"),
            ({"prompt": "x", "allowed_token_ids": [999, 1000]}, "allowed_token_ids", "invalid_value"),
            ({"prompt": "x" * 1601}, "prompt", "context_length_exceeded"),
            ({"prompt": "é" * 801}, "prompt", "context_length_exceeded"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_values_beyond_the_model_are_refused(
        self,
        client: ApiClient,
        redis_client: redis.Redis,
        store: TaskStore,
        settings: ApiSettings,
        card: ModelCard,
        body: Any,
        param: Any,
        code: str,
    ) -> None:
        store.put_model_card(settings.slug, replace(card, max_prompt_bytes=1600))
        reply = client.post("/v1/tasks", json=body)
        check_refused(client, redis_client, reply, 400, param)
        assert reply.json["error"]["code"] == code

    @pytest.mark.parametrize("max_model_len", [100, 10**6])
    @pytest.mark.parametrize(
        "body",
        [
            {"n": 128, "logprobs": 20},
            {"max_tokens": 262_145},
            {"max_tokens": 16_384, "logprobs": 20},
            {"max_tokens": 2**62, "min_tokens": 2**62},
            {"logprobs": 20},
            {},
        ],
    )
    def test_much_output_is_not_refused(
        self,
        client: ApiClient,
        store: TaskStore,
        settings: ApiSettings,
        card: ModelCard,
        body: Any,
        max_model_len: Any,
    ) -> None:
        """It is limited where it is produced. vllm#5907: a small request can ask for much output."""
        store.put_model_card(settings.slug, replace(card, max_model_len=max_model_len, max_prompt_tokens=90))
        assert client.post("/v1/tasks", json={"prompt": "x", **body}).status_code == 202

    def test_a_prompt_of_the_maximum_length_is_accepted(
        self, client: ApiClient, store: TaskStore, settings: ApiSettings, card: ModelCard
    ) -> None:
        store.put_model_card(settings.slug, replace(card, max_prompt_bytes=1600))
        assert client.post("/v1/tasks", json={"prompt": "é" * 800}).status_code == 202
        store.put_model_card(settings.slug, replace(card, max_prompt_bytes=None))
        assert client.post("/v1/tasks", json={"prompt": "x" * 100_000}).status_code == 202

    def test_log_probabilities_of_a_prompt_are_bounded(
        self,
        client: ApiClient,
        redis_client: redis.Redis,
        store: TaskStore,
        settings: ApiSettings,
        card: ModelCard,
    ) -> None:
        """They cannot be truncated, and the worker would refuse the same."""
        store.put_model_card(settings.slug, replace(card, max_model_len=10**6, max_prompt_tokens=10**6))
        for length, status in ((11_915, 202), (11_916, 400)):
            body = {"prompt_token_ids": [1] * length, "prompt_logprobs": 20}
            reply = client.post("/v1/tasks", json=body)
            assert reply.status_code == status
        assert reply.json["error"]["param"] == "prompt_logprobs"

    def test_chat_needs_a_template(
        self,
        client: ApiClient,
        redis_client: redis.Redis,
        store: TaskStore,
        settings: ApiSettings,
        card: ModelCard,
    ) -> None:
        """vllm#39279: a model without a template was a 500."""
        store.put_model_card(settings.slug, replace(card, has_chat_template=False))
        reply = client.post("/v1/tasks", json={"messages": [{"role": "user", "content": "hi"}]})
        check_refused(client, redis_client, reply, 400, "messages")

    def test_values_within_the_limits_are_accepted(self, client: ApiClient, card: ModelCard) -> None:
        assert client.post("/v1/tasks", json={"prompt_token_ids": [999] * 80}).status_code == 202
        body = {"messages": [{"role": "user", "content": "hi"}], "stop_token_ids": [0, 999],
            "logit_bias": {"999": -100}, "allowed_token_ids": [999]}  # fmt: skip
        assert client.post("/v1/tasks", json=body).status_code == 202


def test_another_model_is_not_found(client: ApiClient, redis_client: redis.Redis) -> None:
    reply = client.post("/v1/tasks", json={**GOOD, "model": "gpt-0"})
    check_refused(client, redis_client, reply, 404, "model")
    assert reply.json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("key", ["", '""', "x" * 256, "caf\xe9", "a\tb"])
def test_a_bad_idempotency_key_is_refused(client: ApiClient, redis_client: redis.Redis, key: str) -> None:
    reply = client.post("/v1/tasks", json=GOOD, headers={"Idempotency-Key": key})
    check_refused(client, redis_client, reply, 400, "Idempotency-Key")


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": None, "temperature": None, "stop": None, "metadata": None, "priority": None},
        {"max_tokens": 10**9, "top_k": 9_999_999, "temperature": 1e-5, "seed": 2**64 - 1},
        {"temperature": 0, "top_p": 1, "min_p": 0, "top_k": 0, "seed": -(2**63), "ignore_eos": False},
        {"stop": "x" * 1024, "stop_token_ids": [], "metadata": {"a": {"b": [None, 1.5, "x"]}}},
        {"stop": [], "metadata": {}, "model": "SmolLM2-135M-Instruct", "priority": 0},
    ],
)
def test_unusual_values_in_range_are_accepted(client: ApiClient, body: Any) -> None:
    """vllm#19862: null is unset; a tiny temperature and a top_k beyond the vocabulary are in range."""
    reply = client.post("/v1/tasks", json={"prompt": "x", **body})
    assert reply.status_code == 202, reply.text


def test_a_nul_in_a_prompt_is_kept(client: ApiClient, worker: HandWorker) -> None:
    """llama.cpp#25543: the prompt was cut there."""
    client.post("/v1/tasks", json={"prompt": "a\0b"})
    (task_id,) = worker.claim()
    _, _, (payload,), _ = json.loads(zlib.decompress(worker.owned[task_id].data))
    assert payload["prompt"] == "a\0b"
    assert math.isfinite(payload["sampling"]["seed"])


def test_a_truncated_body_is_refused(client: ApiClient, redis_client: redis.Redis) -> None:
    reply = client.post(
        "/v1/tasks",
        data=json.dumps(GOOD),
        content_type="application/json",
        environ_overrides={"CONTENT_LENGTH": "500", "wsgi.input_terminated": True},
    )
    check_refused(client, redis_client, reply, 400, "body")


def test_an_unsupported_encoding_is_refused(client: ApiClient, redis_client: redis.Redis) -> None:
    reply = client.post(
        "/v1/tasks",
        data=json.dumps(GOOD),
        content_type="application/json",
        headers={"Content-Encoding": "gzip"},
    )
    check_refused(client, redis_client, reply, 415, "Content-Encoding")
    assert "gzip" in reply.json["detail"]
    assert reply.headers["Accept-Encoding"] == "identity"


def test_a_byte_order_mark_is_skipped(client: ApiClient) -> None:
    """ai-memory#500: some editors and shells write one, and RFC 8259 lets readers ignore it."""
    body = b"\xef\xbb\xbf" + json.dumps(GOOD).encode()
    assert client.post("/v1/tasks", data=body, content_type="application/json").status_code == 202


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"prompt": "x"}'.encode("utf-16"), "UTF-16"),
        ('{"prompt": "x"}'.encode("utf-16-le"), "UTF-16 or UTF-32"),
        ('{"prompt": "x"}'.encode("utf-16-be"), "UTF-16 or UTF-32"),
        ('{"prompt": "x"}'.encode("utf-32"), "UTF-32"),
        ('{"prompt": "caf\u00e9"}'.encode("cp1252"), "not UTF-8 (byte 15)"),
        (gzip.compress(b'{"prompt": "x"}'), "compressed (gzip)"),
        (b'{"prompt": x}', "line 1, column 12"),
        (b"\xef\xbb\xbf" * 2 + b"{}", "line 1, column 1"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "too large a number"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_error_names_the_actual_encoding(
    client: ApiClient, redis_client: redis.Redis, body: Any, words: Any
) -> None:
    """gunicorn#1803: the decoder's own messages do not reach the client."""
    reply = client.post("/v1/tasks", data=body, content_type="application/json")
    check_refused(client, redis_client, reply, 400)
    assert words in reply.json["detail"]
    assert not re.search("codec|Expecting|Exceeds|Error|delimiter|0x", reply.json["detail"])


@pytest.mark.parametrize(
    ("charset", "status"), [("utf-8", 202), ("UTF-8", 202), ("utf-16", 415), ("latin-1", 415)]
)
def test_an_unsupported_charset_is_refused(client: ApiClient, charset: str, status: int) -> None:
    content_type = f"application/json; charset={charset}"
    reply = client.post("/v1/tasks", data=json.dumps(GOOD), content_type=content_type)
    assert reply.status_code == status
    assert status == 202 or charset in reply.json["detail"]
