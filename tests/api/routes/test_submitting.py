"""Submission: replies, stored fields, idempotency, waiting, the full queue."""

import json
import threading
import zlib
from typing import Any

import pytest
import redis
from rq.job import Job, JobStatus
from rq.serializers import JSONSerializer

from api.app import ApiApp
from api.routes.tasks import preferred_wait
from api.schemas.requests import TaskBody
from api.submission import body_digest, estimate_cost, parse_idempotency_key
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker, MakeApp, Submit
from tokenmill.protocol import naming
from tokenmill.protocol.messages import JOB_FUNCTION, GenerateRequest
from tokenmill.protocol.records import ModelCard
from tokenmill.settings.declarations import ApiSettings

BODY = {"prompt": "hello", "max_tokens": 4}


def payload_of(worker: HandWorker, task_id: str) -> Any:
    _, _, (payload,), _ = json.loads(zlib.decompress(worker.owned[task_id].data))
    return payload


def test_a_task_is_accepted_while_no_worker_is_up(client: ApiClient) -> None:
    reply = client.post("/v1/tasks", json={**BODY, "metadata": {"order": 7}})
    task = reply.json
    assert reply.status_code == 202
    assert reply.headers["Location"] == task["urls"]["self"] == f"/v1/tasks/{task['id']}"
    assert int(reply.headers["Retry-After"]) >= 1
    assert naming.TASK_ID.fullmatch(task["id"])
    assert (task["object"], task["status"], task["model"]) == ("task", "queued", "SmolLM2-135M-Instruct")
    assert task["queue"] == {"position": 0, "tokens_ahead": 0, "eta_seconds": None, "waiting_for": "worker"}
    assert task["metadata"] == {"order": 7}
    assert task["error"] is None
    assert task["outputs"] == [
        {"index": 0, "text": "", "token_ids": [], "finish_reason": None, "logprobs": None}
    ]


def test_rq_sees_the_job_as_its_own(client: ApiClient, redis_client: redis.Redis, submit: Submit) -> None:
    task_id = submit(max_tokens=4, priority=1)
    job = Job.fetch(task_id, connection=redis_client, serializer=JSONSerializer)
    assert job.get_status() is JobStatus.QUEUED
    assert job.func_name == JOB_FUNCTION
    # RQ's own description would hold the prompt.
    assert job.description == "generate"
    assert job.origin == naming.queue_name(naming.model_slug("SmolLM2-135M-Instruct"), 1, "default")
    assert (job.timeout, job.result_ttl, job.failure_ttl, job.ttl) == (-1, 3600, 3600, None)
    assert job.kwargs == {}
    request = GenerateRequest.from_payload(job.args[0])
    assert (request.id, request.prompt, request.priority) == (task_id, "hello", 1)
    assert job.created_at
    assert job.enqueued_at


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "h\xe9llo \u4f60\u597d \U0001f600\0"},
        {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]},
        {"prompt_token_ids": [1, 2, 3]},
    ],
)
def test_the_worker_gets_the_values_of_the_body(client: ApiClient, worker: HandWorker, body: Any) -> None:
    fields = {"max_tokens": 9, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": -7}
    rest = {"stop": "end", "stop_token_ids": [4], "ignore_eos": True, "priority": 0}
    assert client.post("/v1/tasks", json={**body, **fields, **rest}).status_code == 202
    (task_id,) = worker.claim()
    payload = payload_of(worker, task_id)
    assert payload.pop("sampling") == {**fields, "stop": ["end"], "stop_token_ids": [4], "ignore_eos": True}
    assert payload == {**body, "id": task_id, "model": "SmolLM2-135M-Instruct", "priority": 0}


def test_a_request_without_a_seed_gets_a_random_one(submit: Submit, worker: HandWorker) -> None:
    submit(), submit(), submit(seed=None)
    seeds = {payload_of(worker, task_id)["sampling"]["seed"] for task_id in worker.claim(3)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_defaults_are_left_to_the_worker(submit: Submit, worker: HandWorker) -> None:
    submit(top_p=None)
    (task_id,) = worker.claim()
    assert payload_of(worker, task_id)["sampling"].keys() == {"seed"}
    assert payload_of(worker, task_id)["priority"] == naming.DEFAULT_PRIORITY


class TestIdempotency:
    def test_the_same_body_returns_the_same_task(self, client: ApiClient, redis_client: redis.Redis) -> None:
        first = client.post("/v1/tasks", json=BODY, headers={"Idempotency-Key": '"key 1"'})
        # Another formatting and order, a null field, and the key without quotes.
        again = client.post(
            "/v1/tasks",
            data='{"max_tokens": 4, "top_p": null, "prompt": "h\\u0065llo"}',
            content_type="application/json",
            headers={"Idempotency-Key": "key 1"},
        )
        assert again.status_code == 202
        assert again.json["id"] == first.json["id"]
        assert "Idempotent-Replayed" not in first.headers
        assert again.headers["Idempotent-Replayed"] == "true"
        assert len(redis_client.keys("rq:job:*")) == 1

    def test_another_body_is_refused(self, client: ApiClient, redis_client: redis.Redis) -> None:
        client.post("/v1/tasks", json=BODY, headers={"Idempotency-Key": "k"})
        reply = client.post("/v1/tasks", json={**BODY, "max_tokens": 5}, headers={"Idempotency-Key": "k"})
        assert reply.status_code == 422
        assert reply.json["error"]["code"] == "idempotency_key_reused"
        assert reply.json["error"]["param"] == "Idempotency-Key"
        assert len(redis_client.keys("rq:job:*")) == 1

    def test_a_random_seed_does_not_change_the_digest(self, client: ApiClient) -> None:
        ids = {client.post("/v1/tasks", json=BODY, headers={"Idempotency-Key": "k"}).json["id"] for _ in "ab"}
        assert len(ids) == 1

    def test_a_refused_body_leaves_no_record(self, client: ApiClient) -> None:
        bad = client.post("/v1/tasks", json={"prompt": ""}, headers={"Idempotency-Key": "k"})
        good = client.post("/v1/tasks", json=BODY, headers={"Idempotency-Key": "k"})
        assert (bad.status_code, good.status_code) == (400, 202)
        assert "Idempotent-Replayed" not in good.headers

    def test_many_at_once_make_one_task(self, app: ApiApp, redis_client: redis.Redis) -> None:
        replies = []

        def post() -> None:
            replies.append(client_of(app).post("/v1/tasks", json=BODY, headers={"Idempotency-Key": "k"}))

        threads = [threading.Thread(target=post) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {reply.status_code for reply in replies} == {202}
        assert len({reply.json["id"] for reply in replies}) == 1
        assert sum("Idempotent-Replayed" not in reply.headers for reply in replies) == 1

    @pytest.mark.parametrize(
        ("header", "key"), [('"a"', "a"), ("a", "a"), (' "a b" ', "a b"), (r'"a\"\\b"', 'a"\\b'), ('"', '"')]
    )
    def test_keys_may_be_quoted_or_bare(self, header: str, key: str) -> None:
        assert parse_idempotency_key(header) == key


class TestFullQueue:
    @pytest.fixture
    def settings(self, redis_url: str) -> Any:
        return ApiSettings(redis_url=redis_url, max_waiting_tasks=3)

    def test_a_full_queue_is_refused_with_a_retry_after(
        self, client: ApiClient, submit: Submit, redis_client: redis.Redis
    ) -> None:
        for _ in range(3):
            submit()
        reply = client.post("/v1/tasks", json=BODY)
        assert reply.status_code == 429
        assert reply.content_type == "application/problem+json"
        assert (reply.json["depth"], reply.json["limit"], reply.json["limit_met"]) == (3, 3, "tasks")
        assert reply.json["waiting_tokens"] == 3 * (2 + 256)
        assert reply.json["token_limit"] == 10_000_000
        # Without API keys there is one tenant, and all of the limit is its own.
        assert (reply.json["limit_of"], reply.json["tenant_depth"]) == ("all", 3)
        assert reply.json["error"]["type"] == "rate_limit_error"
        assert reply.json["error"]["code"] == "queue_full"
        assert 1 <= int(reply.headers["Retry-After"]) <= 60
        assert len(redis_client.keys("rq:job:*")) == 3

    def test_the_retry_after_comes_from_the_drain_rate(
        self, client: ApiClient, submit: Submit, worker: HandWorker
    ) -> None:
        for _ in range(3):
            submit(max_tokens=100_000)
        worker.run("x")
        submit(max_tokens=1)
        stats = worker.store.queue_stats(worker.slug)
        assert stats.drain_rate
        share = stats.waiting_cost / 3 / stats.drain_rate
        reply = client.post("/v1/tasks", json=BODY)
        assert int(reply.headers["Retry-After"]) == max(1, min(60, -(-share // 1)))

    def test_claimed_tasks_do_not_count(self, submit: Submit, worker: HandWorker) -> None:
        for _ in range(3):
            submit()
        worker.claim(2)
        submit(), submit()

    def test_a_full_queue_still_answers_a_known_key(self, client: ApiClient, submit: Submit) -> None:
        first = client.post("/v1/tasks", json=BODY, headers={"Idempotency-Key": "k"})
        submit(), submit()
        again = client.post("/v1/tasks", json=BODY, headers={"Idempotency-Key": "k"})
        assert (again.status_code, again.json["id"]) == (202, first.json["id"])

    def test_a_key_can_be_used_again_after_a_refusal(
        self, client: ApiClient, submit: Submit, worker: HandWorker, redis_client: redis.Redis
    ) -> None:
        for _ in range(3):
            submit()
        before = sorted(redis_client.keys())
        headers = {"Idempotency-Key": "k"}
        assert client.post("/v1/tasks", json=BODY, headers=headers).status_code == 429
        assert sorted(redis_client.keys()) == before
        worker.claim()
        reply = client.post("/v1/tasks", json={**BODY, "max_tokens": 5}, headers=headers)
        assert (reply.status_code, "Idempotent-Replayed" in reply.headers) == (202, False)

    def test_no_limit(self, redis_url: str, make_app: MakeApp) -> None:
        client = client_of(make_app(ApiSettings(redis_url=redis_url, max_waiting_tasks=0)))
        assert {client.post("/v1/tasks", json=BODY).status_code for _ in range(10)} == {202}


class TestTooManyTokens:
    @pytest.fixture
    def settings(self, redis_url: str) -> Any:
        return ApiSettings(redis_url=redis_url, max_waiting_tokens=1000)

    def test_a_task_that_does_not_fit_gets_a_retry_after(
        self, client: ApiClient, submit: Submit, worker: HandWorker, redis_client: redis.Redis
    ) -> None:
        submit(max_tokens=900)
        reply = client.post("/v1/tasks", json={"prompt": "x", "max_tokens": 50, "n": 2})
        assert reply.status_code == 429
        assert reply.json["error"]["code"] == "queue_full"
        assert (reply.json["limit_met"], reply.json["depth"]) == ("tokens", 1)
        assert (reply.json["waiting_tokens"], reply.json["token_limit"]) == (902, 1000)
        assert int(reply.headers["Retry-After"]) == 10
        # With one output it fits.
        submit(max_tokens=50)

    def test_the_retry_after_is_the_time_of_the_excess_tokens(
        self, client: ApiClient, submit: Submit, worker: HandWorker
    ) -> None:
        submit(max_tokens=90), submit(max_tokens=898)
        worker.run("x")
        rate = worker.store.queue_stats(worker.slug).drain_rate
        assert rate is not None
        reply = client.post("/v1/tasks", json={"prompt": "x", "max_tokens": 600})
        assert int(reply.headers["Retry-After"]) == max(1, min(60, -(-(900 + 601 - 1000) // rate)))

    def test_a_task_larger_than_the_limit_is_accepted_alone(
        self, client: ApiClient, submit: Submit, worker: HandWorker
    ) -> None:
        submit(max_tokens=5000)
        assert client.post("/v1/tasks", json=BODY).status_code == 429
        worker.claim()
        submit(max_tokens=5000)


class TestPreferWait:
    def test_a_task_that_ends_in_time_is_returned_complete(
        self, app: ApiApp, client: ApiClient, worker: HandWorker
    ) -> None:
        replies = []

        def post() -> None:
            replies.append(client.post("/v1/tasks", json=BODY, headers={"Prefer": "respond-async, wait=60"}))

        thread = threading.Thread(target=post)
        thread.start()
        while not (claimed := worker.claim()):
            pass
        worker.start(claimed[0])
        worker.say(claimed[0], "a", "b")
        worker.finish(claimed[0])
        thread.join()
        (reply,) = replies
        assert reply.status_code == 200
        assert reply.headers["Preference-Applied"] == "wait=60"
        assert reply.json["status"] == "completed"
        assert reply.json["outputs"][0]["text"] == "ab"

    def test_a_task_that_does_not_end_in_time_is_accepted(self, client: ApiClient) -> None:
        reply = client.post("/v1/tasks", json=BODY, headers={"Prefer": "wait=1"})
        assert (reply.status_code, reply.json["status"]) == (202, "queued")
        assert "Preference-Applied" not in reply.headers

    @pytest.mark.parametrize(
        ("prefer", "seconds"),
        [
            (None, 0),
            ("", 0),
            ("wait=5", 5),
            ("wait = 5", 5),
            ("respond-async, wait=10", 10),
            ("Wait=10; foo", 10),
            ("wait=600", 60),
            ("wait=-1", 0),
            ("wait=1.5", 0),
            ("wait=99999999999999", 0),
            ("await=5", 0),
            # RFC 7240: a preference that is not understood is ignored.
            ("wait=abc", 0),
            ('wait="5"', 0),
        ],
    )
    def test_parsing_prefer(self, prefer: Any, seconds: float) -> None:
        assert preferred_wait(prefer) == seconds


def cost(card: ModelCard | None = None, **fields: object) -> int:
    return estimate_cost(TaskBody.model_validate(fields), card)


def test_the_estimate_counts_bytes_and_output(card: ModelCard) -> None:
    assert cost(prompt="x" * 40, max_tokens=10) == 11 + 10
    assert cost(prompt_token_ids=[1] * 40, max_tokens=10) == 50
    # Outputs share the prompt; each may be as long as it would be alone.
    assert cost(prompt_token_ids=[1] * 40, max_tokens=10, n=3) == 70
    assert cost(prompt_token_ids=[1] * 40, max_tokens=500, n=2, card=card) == 40 + 2 * 60
    # The estimate is at most the length of the model, or a maximum before the model is known.
    assert cost(prompt="x", max_tokens=10**30, card=card) == card.max_model_len
    assert cost(prompt="x", max_tokens=10**30) == 2**17


def test_the_digest_is_of_the_values() -> None:
    def digest(**fields: Any) -> Any:
        return body_digest(TaskBody(prompt="x", **fields))

    assert digest(temperature=1) == digest(temperature=1.0)
    assert digest(stop="a") == digest(stop=["a"])
    assert digest(seed=None) == digest()
    # Defaults are not filled in: an explicit default differs from an unset field.
    assert len({digest(), digest(seed=0), digest(temperature=1.0), digest(priority=2)}) == 4
