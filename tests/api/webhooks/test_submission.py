"""Which tasks may have a webhook."""

from typing import Any

import pytest
import redis

from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import Deliver, HandWorker, MakeApp, Submit
from tests.api.webhooks.delivering import SECRET
from tests.api.webhooks.receiver import Receiver
from tokenmill.protocol import keys
from tokenmill.settings.declarations import ApiSettings


@pytest.fixture
def settings(redis_url: str) -> Any:
    return ApiSettings(redis_url=redis_url, webhook_secret=SECRET, webhook_allow_private=True)


class TestSubmission:
    def test_a_task_is_kept_until_its_webhook_is_delivered(
        self,
        client: ApiClient,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        deliver: Deliver,
        redis_client: redis.Redis,
    ) -> None:
        task_id = submit(webhook={"url": receiver.url()})
        worker.run("a")
        assert redis_client.ttl(keys.run(task_id)) > 86_400
        deliver()
        assert redis_client.ttl(keys.run(task_id)) <= 3600
        assert client.get(f"/v1/tasks/{task_id}").status_code == 200

    @pytest.mark.parametrize(
        ("webhook", "param"),
        [
            ({}, "webhook.url"),
            ({"url": None}, "webhook.url"),
            ({"url": 5}, "webhook.url"),
            ({"url": ""}, "webhook.url"),
            ({"url": "ftp://example.org/"}, "webhook.url"),
            ({"url": "http://user:password@example.org/"}, "webhook.url"),
            ({"url": f"http://example.org/{'x' * 2048}"}, "webhook.url"),
            ({"url": "http://example.org/", "secret": SECRET}, "webhook.secret"),
            ("http://example.org/", "webhook"),
            ([], "webhook"),
        ],
    )
    def test_a_bad_webhook_is_refused_by_name(
        self, client: ApiClient, webhook: Any, param: Any, redis_client: redis.Redis
    ) -> None:
        reply = client.post("/v1/tasks", json={"prompt": "x", "webhook": webhook})
        assert (reply.status_code, reply.json["error"]["param"]) == (400, param)
        assert list(redis_client.scan_iter("tokenmill:run:*")) == []

    @pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "localhost", "10.1.2.3:8080"])
    def test_a_private_address_is_refused_unless_it_is_allowed(
        self, redis_url: str, make_app: MakeApp, settings: ApiSettings, host: str
    ) -> None:
        body = {"prompt": "x", "webhook": {"url": f"http://{host}/"}}
        closed = ApiSettings(redis_url=redis_url, webhook_secret=SECRET)
        reply = client_of(make_app(closed)).post("/v1/tasks", json=body)
        assert reply.status_code == 400
        assert (reply.json["error"]["param"], reply.json["error"]["code"]) == (
            "webhook.url",
            "webhook_address",
        )
        assert client_of(make_app(settings)).post("/v1/tasks", json=body).status_code == 202

    def test_without_a_secret_webhooks_are_refused(self, redis_url: str, make_app: MakeApp) -> None:
        """Receivers could not verify them."""
        app = make_app(ApiSettings(redis_url=redis_url))
        body = {"prompt": "x", "webhook": {"url": "https://example.org/"}}
        reply = client_of(app).post("/v1/tasks", json=body)
        assert (reply.status_code, reply.json["error"]["code"]) == (400, "webhooks_disabled")
        assert "TOKENMILL_WEBHOOK_SECRET" in reply.json["error"]["message"]
        assert client_of(app).post("/v1/tasks", json={**body, "webhook": None}).status_code == 202

    def test_another_webhook_changes_the_digest(self, client: ApiClient) -> None:
        headers = {"Idempotency-Key": "k"}
        statuses = [
            client.post(
                "/v1/tasks", json={"prompt": "x", "webhook": {"url": url}}, headers=headers
            ).status_code
            for url in ("https://example.org/a", "https://example.org/a", "https://example.org/b")
        ]
        assert statuses == [202, 202, 422]
