"""Liveness, readiness, metrics, and replies while Redis is down."""

import json
import re
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from api.app import ApiApp, create_app
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker, Submit
from tests.conftest import free_port, start_redis
from tokenmill.protocol.records import WorkerRecord
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings


def test_liveness_needs_no_redis() -> None:
    client = client_of(create_app(ApiSettings(redis_url="redis://127.0.0.1:1/0")))
    assert client.get("/livez").json == {"state": "alive"}


class TestReadiness:
    def test_no_worker(self, client: ApiClient) -> None:
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json["state"]) == (503, "no_worker")
        assert reply.content_type == "application/problem+json"
        assert int(reply.headers["Retry-After"]) >= 1

    def test_a_loading_worker_shows_its_progress(self, client: ApiClient, worker: HandWorker) -> None:
        worker.report("loading", "weights: 42 %")
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json["state"]) == (503, "loading")
        assert reply.json["workers"][0]["detail"] == "weights: 42 %"

    @pytest.mark.parametrize("state", ["draining", "stalled"])
    def test_a_worker_that_accepts_no_tasks(self, client: ApiClient, worker: HandWorker, state: Any) -> None:
        worker.report(state)
        assert (client.get("/readyz").status_code, client.get("/readyz").json["state"]) == (503, state)

    def test_a_newer_worker_may_report_an_unknown_state(
        self, client: ApiClient, worker: HandWorker, store: TaskStore
    ) -> None:
        worker.report(cast(Any, "hibernating"))
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json["state"]) == (503, "hibernating")
        record = WorkerRecord(name="b", model="m", slug=worker.slug, state="ready", started_at=0.0)
        store.put_worker(record, ttl_seconds=60)
        reply = client.get("/readyz")
        assert reply.status_code == 200
        assert {view["state"] for view in reply.json["workers"]} == {"hibernating", "ready"}
        assert re.search(
            r'tokenmill_workers\{model="[^"]+",state="other"\} 1\.0', client.get("/metrics").text
        )

    def test_one_ready_worker_is_enough(
        self, client: ApiClient, worker: HandWorker, store: TaskStore
    ) -> None:
        worker.report("ready")
        record = WorkerRecord(name="b", model="m", slug=worker.slug, state="loading", started_at=0.0)
        store.put_worker(record, ttl_seconds=60)
        reply = client.get("/readyz")
        assert (reply.status_code, reply.json["state"]) == (200, "ready")
        assert {view["name"] for view in reply.json["workers"]} == {"hand", "b"}

    def test_a_worker_of_another_model_does_not_count(self, client: ApiClient, store: TaskStore) -> None:
        record = WorkerRecord(name="b", model="m", slug="other", state="ready", started_at=0.0)
        store.put_worker(record, ttl_seconds=60)
        assert client.get("/readyz").json["state"] == "no_worker"

    def test_the_record_of_a_silent_worker_expires(
        self, client: ApiClient, worker: HandWorker, store: TaskStore
    ) -> None:
        record = WorkerRecord(name="hand", model="m", slug=worker.slug, state="ready", started_at=0.0)
        store.put_worker(record, ttl_seconds=0.05)
        while client.get("/readyz").status_code == 200:
            pass

    def test_a_redis_that_refuses_tasks_is_not_ready(
        self, client: ApiClient, worker: HandWorker, redis_client: redis.Redis
    ) -> None:
        """Workers still report, and every submission is refused."""
        worker.report("ready")
        redis_client.config_set("maxmemory", "1")
        try:
            reply = client.get("/readyz")
            assert (reply.status_code, reply.json["state"]) == (503, "redis_refuses")
            assert "memory is full" in reply.json["detail"]
        finally:
            redis_client.config_set("maxmemory", "0")
        assert client.get("/readyz").status_code == 200

    def test_unsafe_redis_settings_are_reported(
        self, app: ApiApp, client: ApiClient, worker: HandWorker, redis_client: redis.Redis
    ) -> None:
        worker.report("ready")
        assert client.get("/readyz").json["warnings"] == []
        redis_client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            app.parts.redis_checks.check()
        finally:
            redis_client.config_set("maxmemory-policy", "noeviction")
        (warning,) = client.get("/readyz").json["warnings"]
        assert "allkeys-lru" in warning


def series(client: ApiClient) -> Any:
    return {
        line.rsplit(" ", 1)[0]
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("tokenmill_http_requests_total")
    }


class TestMetrics:
    def test_get_and_head(self, client: ApiClient, submit: Submit) -> None:
        submit()
        body = client.get("/metrics").text
        assert 'tokenmill_http_requests_total{method="POST",route="/v1/tasks",status="202"} 1.0' in body
        assert re.search(r'tokenmill_queue_tasks\{model="[^"]+",priority="2"\} 1\.0', body)
        assert client.head("/metrics").status_code == 200

    def test_clients_cannot_create_labels(self, client: ApiClient, submit: Submit) -> None:
        """litellm#35666, otari#264, llm-d-batch-gateway#202: paths, ids, models and methods became labels."""
        task_id = submit()
        for path in ("/", f"/v1/tasks/{task_id}", f"/v1/tasks/{task_id}/cancel", "/v1/tasks/x", "/livez"):
            client.get(path)
        client.open("/v1/tasks", method="FOO0")
        client.get("/metrics")
        before = series(client)
        for i in range(200):
            client.get(f"/path/{i}")
            client.get(f"/v1/tasks/{i:032x}")
            client.open("/v1/tasks", method=f"FOO{i}")
            if i % 25 == 0:
                client.post("/v1/tasks", json={"prompt": "x", "model": f"m{i}", "user": f"u{i}"})
        new = series(client) - before
        assert len(new) <= 5, new


class TestRedisAway:
    def test_every_call_is_503_and_recovers(self, tmp_path: Path) -> None:
        """503 with Retry-After while Redis is down. The same process recovers."""
        port = free_port()
        client = client_of(create_app(ApiSettings(redis_url=f"redis://127.0.0.1:{port}/0")))
        for _ in range(2):
            server = start_redis(tmp_path, port)
            task_id = client.post("/v1/tasks", json={"prompt": "x"}).json["id"]
            assert client.get(f"/v1/tasks/{task_id}").status_code == 200
            server.process.terminate()
            server.process.wait()
            for method, url in (
                ("POST", "/v1/tasks"),
                ("GET", f"/v1/tasks/{task_id}"),
                ("GET", f"/v1/tasks/{task_id}/events"),
                ("DELETE", f"/v1/tasks/{task_id}"),
            ):
                reply = client.open(url, method=method, json={"prompt": "x"})
                assert (reply.status_code, reply.json["error"]["code"]) == (503, "store_unavailable")
                assert int(reply.headers["Retry-After"]) >= 1
            assert client.get("/readyz").json["state"] == "no_redis"
            assert "tokenmill_redis_up 0.0" in client.get("/metrics").text

    def test_a_full_redis_refuses_submissions_and_recovers(
        self, client: ApiClient, redis_client: redis.Redis
    ) -> None:
        """durabull#64: the memory limit was a crash. With `noeviction` it is a 503 that passes."""
        redis_client.config_set("maxmemory", "1")
        try:
            reply = client.post("/v1/tasks", json={"prompt": "x"})
            assert (reply.status_code, reply.json["error"]["code"]) == (503, "store_unavailable")
            assert "memory is full" in reply.json["detail"]
        finally:
            redis_client.config_set("maxmemory", "0")
        assert client.post("/v1/tasks", json={"prompt": "x"}).status_code == 202

    def test_a_stream_continues_after_a_restart(self, tmp_path: Path) -> None:
        """redis-py#1573, rq#1653: a subscriber received nothing after a restart."""
        port = free_port()
        settings = ApiSettings(redis_url=f"redis://127.0.0.1:{port}/0")
        server = start_redis(tmp_path, port)
        app = create_app(settings)
        client = client_of(app)
        try:
            task_id = client.post("/v1/tasks", json={"prompt": "x"}).json["id"]
            chunks = client.get(f"/v1/tasks/{task_id}/events", buffered=False).iter_encoded()
            assert next(chunks) == b"retry: 1000\n\n"
            server.process.send_signal(signal.SIGTERM)
            server.process.wait()
            server = start_redis(tmp_path, port)
            client.delete(f"/v1/tasks/{task_id}")
            events = b"".join(chunks)
        finally:
            app.parts.hub.close()
            server.process.kill()
            server.process.wait()
        data = json.loads(events.split(b"data: ")[1].split(b"\n")[0])
        assert (data["seq"], data["finish_reason"]) == (0, "cancelled")
