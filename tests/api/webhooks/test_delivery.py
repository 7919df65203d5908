"""Webhooks from submission to receiver: contents, retries, and outcomes."""

from itertools import pairwise
from typing import Any

import pytest
import redis

from api.webhooks.deliverer import JITTER, MAX_TRIES, RETRY_DELAYS
from api.webhooks.http_post import Poster
from tests.api.api_client import ApiClient
from tests.api.conftest import Deliver, HandWorker, MakeDeliverer, Outcomes, Submit
from tests.api.webhooks.delivering import SECRET, verified
from tests.api.webhooks.receiver import Receiver, answer, close
from tokenmill.protocol import keys
from tokenmill.protocol.messages import TaskError
from tokenmill.protocol.store.outbox import Outbox
from tokenmill.settings.declarations import ApiSettings


@pytest.fixture
def settings(redis_url: str) -> Any:
    return ApiSettings(redis_url=redis_url, webhook_secret=SECRET, webhook_allow_private=True)


class TestWhatIsSent:
    def test_a_completed_task(
        self,
        client: ApiClient,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        deliver: Deliver,
        clock: Any,
        outcomes: Outcomes,
    ) -> None:
        task_id = submit(webhook={"url": receiver.url("/hook?x=1")}, metadata={"order": "\u00e4"})
        worker.run("Hel", "l\u00f6\n")
        assert deliver() == 1
        call = receiver.next()
        event = verified(call)
        assert call.line == "POST /hook?x=1 HTTP/1.1"
        assert call.headers["webhook-id"] == f"msg_{task_id}"
        assert call.headers["webhook-timestamp"] == str(int(clock.now))
        assert event["type"] == "task.completed"
        assert event["timestamp"].endswith("Z")
        polled = client.get(f"/v1/tasks/{task_id}").json
        assert event["data"] == {**polled, "webhook": None}
        assert polled["webhook"] == {
            "url": receiver.url("/hook"),
            "state": "delivered",
            "attempts": 1,
            "last_status": 200,
            "last_error": None,
            "next_attempt_at": None,
            "ended_at": polled["webhook"]["ended_at"],
        }
        assert event["data"]["outputs"][0]["text"] == "Hell\u00f6\n"
        assert deliver(silence_seconds=0) == 0
        assert outcomes() == (1, 0, 0)

    def test_a_failed_task(
        self, submit: Submit, worker: HandWorker, receiver: Receiver, deliver: Deliver
    ) -> None:
        task_id = submit(webhook={"url": receiver.url()})
        worker.claim()
        worker.say(task_id, "a")
        worker.finish(task_id, "error", TaskError(type="server_error", code="engine_error", message="broke"))
        deliver()
        event = verified(receiver.next())
        assert (event["type"], event["data"]["error"]["code"]) == ("task.failed", "engine_error")

    def test_a_cancelled_task(
        self, client: ApiClient, submit: Submit, receiver: Receiver, deliver: Deliver
    ) -> None:
        task_id = submit(webhook={"url": receiver.url()})
        client.delete(f"/v1/tasks/{task_id}")
        deliver()
        assert verified(receiver.next())["type"] == "task.cancelled"

    def test_nothing_is_sent_before_the_end_or_without_a_webhook(
        self, submit: Submit, worker: HandWorker, receiver: Receiver, deliver: Deliver
    ) -> None:
        submit()
        worker.run("a")
        task_id = submit(webhook={"url": receiver.url()})
        worker.claim()
        worker.say(task_id, "a")
        assert deliver() == 0


class TestTries:
    def test_failed_tries_are_retried(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        deliver: Deliver,
        clock: Any,
        outcomes: Outcomes,
    ) -> None:
        """Each try has its own time and signature, and the same id and body."""
        receiver.will(answer(500), close, answer(302, "Location: /elsewhere"), answer(200))
        task_id = submit(webhook={"url": receiver.url()})
        worker.run("a")
        for delay in RETRY_DELAYS[:3]:
            assert deliver() == 1
            assert deliver(silence_seconds=0) == 0
            clock.turn(delay)
        assert deliver() == 1
        calls = [receiver.next() for _ in range(4)]
        assert len({call.body for call in calls}) == 1
        assert {call.headers["webhook-id"] for call in calls} == {f"msg_{task_id}"}
        times = [int(call.headers["webhook-timestamp"]) for call in calls]
        assert [later - earlier for earlier, later in pairwise(times)] == list(RETRY_DELAYS[:3])
        for call in calls:
            verified(call)
        assert outcomes() == (1, 3, 0)
        assert clock.waits() == []

    def test_eight_tries_over_a_day(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        deliver: Deliver,
        clock: Any,
        outcomes: Outcomes,
        redis_client: redis.Redis,
    ) -> None:
        receiver.will(*[answer(503)] * MAX_TRIES)
        task_id = submit(webhook={"url": receiver.url()})
        worker.run("a")
        began = clock.now
        for delay in RETRY_DELAYS:
            assert deliver() == 1
            assert clock.waits() == [pytest.approx(delay, abs=60)]
            # One minute more, because the clock of Redis has advanced too.
            clock.turn(delay + 60)
        assert clock.now - began == pytest.approx(86_400, rel=0.05)
        assert deliver() == 1
        clock.turn(10**6)
        assert deliver(silence_seconds=0) == 0
        assert receiver.calls.qsize() == MAX_TRIES == 8
        assert outcomes() == (0, 7, 1)
        assert redis_client.xlen(keys.OUTBOX) == 0
        assert redis_client.ttl(keys.run(task_id)) <= 3600

    def test_retries_of_concurrent_failures_are_spread(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        outbox: Outbox,
        clock: Any,
        make_deliverer: MakeDeliverer,
    ) -> None:
        receiver.will(answer(500), answer(500))
        shares = iter([0.0, 1.0])
        deliverer = make_deliverer(jitter=lambda: next(shares))
        for _ in range(2):
            submit(webhook={"url": receiver.url()})
            worker.run("a")
        for webhook in outbox.take(2, silence_seconds=3600):
            deliverer.deliver(webhook)
        first, second = sorted(clock.waits())
        assert second - first > RETRY_DELAYS[0] * JITTER / 2

    def test_status_410_ends_the_retries(
        self, submit: Submit, worker: HandWorker, receiver: Receiver, deliver: Deliver, outcomes: Outcomes
    ) -> None:
        receiver.will(answer(410))
        submit(webhook={"url": receiver.url()})
        worker.run("a")
        deliver()
        assert deliver(silence_seconds=0) == 0
        assert outcomes() == (0, 0, 1)

    def test_a_private_address_is_not_called(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        outbox: Outbox,
        make_deliverer: MakeDeliverer,
        outcomes: Outcomes,
    ) -> None:
        """A name with a private address is refused when it is resolved."""
        submit(webhook={"url": receiver.url()})
        worker.run("a")
        deliverer = make_deliverer(Poster(allow_private=False))
        (webhook,) = outbox.take(1, silence_seconds=3600)
        deliverer.deliver(webhook)
        assert receiver.calls.empty()
        assert outcomes() == (0, 1, 0)

    def test_the_log_does_not_contain_the_url(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        deliver: Deliver,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level("INFO")
        receiver.will(answer(500), answer(410))
        submit(webhook={"url": receiver.url("/secret?token=secret")})
        worker.run("a")
        deliver()
        assert "127.0.0.1" in caplog.text
        assert "secret" not in caplog.text
