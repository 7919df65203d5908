"""Several deliverers, and deliverers that die: every webhook is delivered without delaying others."""

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest
import redis

from api.background.webhook_delivery import RETRY_SECONDS, deliver_due, renew_leases
from api.redis_clients import connect
from api.schemas.webhook_url import Target
from api.webhooks.deliverer import LEASE_SECONDS, MAX_CONCURRENT, RENEW_SECONDS
from api.webhooks.http_post import Poster, PostFailed
from api.webhooks.receiver_limits import MAX_UNPROVEN
from tests.api.conftest import HandWorker, MakeDeliverer, Outcomes, Submit
from tests.api.webhooks.delivering import SECRET
from tests.api.webhooks.receiver import Receiver, say
from tests.live_service import wait_for
from tokenmill.protocol import keys
from tokenmill.protocol.store.outbox import Attempt, Outbox, Undelivered
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings


@pytest.fixture
def settings(redis_url: str) -> Any:
    return ApiSettings(redis_url=redis_url, webhook_secret=SECRET, webhook_allow_private=True)


class TestDeaths:
    def test_a_deliverer_that_dies_before_storing_the_outcome(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        outbox: Outbox,
        make_deliverer: MakeDeliverer,
        outcomes: Outcomes,
        redis_client: redis.Redis,
    ) -> None:
        """The receiver gets it twice, with the same id."""

        class Dying(Outbox):
            def done(self, webhook: Any, attempt: Any) -> None:
                raise redis.ConnectionError("cut off")

        submit(webhook={"url": receiver.url()})
        worker.run("a")
        dying = make_deliverer(outbox=Dying(redis_client))
        (webhook,) = outbox.take(1, silence_seconds=3600)
        with pytest.raises(redis.ConnectionError):
            dying.deliver(webhook)
        assert outbox.take(1, silence_seconds=3600) == []
        heir = make_deliverer()
        (again,) = outbox.take(1, silence_seconds=0)
        heir.deliver(again)
        first, second = receiver.next(), receiver.next()
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert first.body == second.body
        assert outcomes() == (1, 0, 0)
        assert outbox.take(1, silence_seconds=0) == []

    def test_an_internal_error_is_logged_and_retried(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        make_deliverer: MakeDeliverer,
        outbox: Outbox,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        class Faulty:
            def addresses(self, target: Target) -> list[str]:
                return ["127.0.0.1"]

            def post(self, target: Target, headers: Any, body: bytes, addresses: Any) -> int:
                raise ZeroDivisionError

        submit(webhook={"url": receiver.url()})
        worker.run("a")
        deliverer = make_deliverer(Faulty())
        assert deliverer.deliver_due() == 1
        deliverer.wait_idle()
        assert "internal error" in caplog.text
        assert deliverer.num_leased == 0
        (webhook,) = outbox.take(1, silence_seconds=0)
        assert webhook.tries == 0

    def test_an_outage_of_redis_is_retried(self, make_deliverer: MakeDeliverer, store: TaskStore) -> None:
        gone = Outbox(connect("redis://127.0.0.1:1/0"))
        deliverer = make_deliverer(outbox=gone)
        for _ in range(2 * MAX_CONCURRENT):
            assert deliver_due(deliverer) == RETRY_SECONDS

    def test_an_error_that_is_no_outage_is_logged(
        self, make_deliverer: MakeDeliverer, redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Faulty(Outbox):
            def take(self, max_webhooks: int, *, silence_seconds: float) -> list[Undelivered]:
                raise redis.ResponseError("ERR a bug")

        assert deliver_due(make_deliverer(outbox=Faulty(redis_client))) == RETRY_SECONDS
        assert "cannot deliver webhooks" in caplog.text

    def test_webhooks_return_if_no_thread_can_be_started(
        self,
        submit: Submit,
        worker: HandWorker,
        make_deliverer: MakeDeliverer,
        outbox: Outbox,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Their leases are not renewed, including those of webhooks that were taken together."""

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        for _ in range(3):
            submit(webhook={"url": "http://h.example/"})
            worker.run("a")
        deliverer = make_deliverer()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            assert deliver_due(deliverer) == RETRY_SECONDS
        assert deliverer.num_leased == 0
        assert len(outbox.take(3, silence_seconds=0)) == 3


class TestLeases:
    def test_only_expired_leases_are_taken_over(
        self,
        submit: Submit,
        worker: HandWorker,
        make_deliverer: MakeDeliverer,
        outbox: Outbox,
        redis_client: redis.Redis,
    ) -> None:
        """The lease is renewed during a slow delivery. After a kill another deliverer takes over."""
        begun, over = threading.Event(), threading.Event()

        class Slow:
            def addresses(self, target: Target) -> list[str]:
                return ["203.0.113.1"]

            def post(self, target: Target, headers: Any, body: bytes, addresses: Any) -> int:
                begun.set()
                over.wait(60)
                return 200

        submit(webhook={"url": "http://slow.example/"})
        worker.run("a")
        deliverer = make_deliverer(Slow())
        assert deliverer.deliver_due() == 1
        assert begun.wait(60)
        group = (keys.OUTBOX, "deliverers")
        (held,) = redis_client.xpending_range(*group, "-", "+", 10)
        # As if it had been held for longer than a lease.
        redis_client.xclaim(*group, "api", 0, [held["message_id"]], idle=60_000, justid=True)
        deliverer.renew_leases()
        assert outbox.take(1, silence_seconds=LEASE_SECONDS) == []
        redis_client.xclaim(*group, "api", 0, [held["message_id"]], idle=60_000, justid=True)
        (taken,) = outbox.take(1, silence_seconds=LEASE_SECONDS)
        assert taken.entry_id == cast(bytes, held["message_id"]).decode()
        over.set()
        deliverer.wait_idle()
        assert deliverer.num_leased == 0
        deliverer.renew_leases()

    def test_renewals_continue_after_an_outage(
        self, make_deliverer: MakeDeliverer, redis_client: redis.Redis
    ) -> None:
        class Gone(Outbox):
            def renew(self, entry_ids: Sequence[str]) -> None:
                raise redis.ConnectionError("away")

        assert renew_leases(make_deliverer(outbox=Gone(redis_client))) == RENEW_SECONDS

    def test_a_renewal_restores_no_finished_webhook(
        self, submit: Submit, worker: HandWorker, outbox: Outbox, redis_client: redis.Redis
    ) -> None:
        submit(webhook={"url": "http://h.example/"})
        worker.run("a")
        (webhook,) = outbox.take(1, silence_seconds=3600)
        outbox.done(webhook, Attempt(200))
        outbox.renew([webhook.entry_id])
        assert outbox.take(1, silence_seconds=0) == []

    def test_several_renewals_fit_into_a_lease(self) -> None:
        """The documented bound after a kill is one lease and one check of the outbox."""
        assert 3 * RENEW_SECONDS < LEASE_SECONDS <= 10


class TestManyAtOnce:
    def test_several_deliverers_share_the_work(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        make_deliverer: MakeDeliverer,
        redis_url: str,
    ) -> None:
        ids = [submit(webhook={"url": receiver.url()}) for _ in range(40)]
        for _ in ids:
            worker.run("a")
        deliverers = [make_deliverer(outbox=Outbox(connect(redis_url))) for _ in range(3)]
        # One receiver does not occupy all deliveries: some webhooks are postponed for a second.
        while receiver.calls.qsize() < len(ids):
            for deliverer in deliverers:
                deliverer.deliver_due()
        heard = sorted(receiver.next().headers["webhook-id"] for _ in ids)
        assert heard == sorted(f"msg_{task_id}" for task_id in ids)
        assert receiver.calls.empty()

    def test_a_silent_receiver_does_not_delay_others(
        self,
        submit: Submit,
        worker: HandWorker,
        make_deliverer: MakeDeliverer,
        outbox: Outbox,
        redis_client: redis.Redis,
    ) -> None:
        called, over = threading.Event(), threading.Event()
        waiting = []

        class Sender:
            def addresses(self, target: Target) -> list[str]:
                return [{"alive.example": "198.51.100.1"}.get(target.host, "203.0.113.1")]

            def post(self, target: Target, headers: Any, body: bytes, addresses: Any) -> int:
                if target.host == "alive.example":
                    called.set()
                    return 200
                waiting.append(target)
                if len(waiting) > 1:
                    over.wait(60)
                raise PostFailed("timed out")

        def ended(host: str) -> str:
            task_id = submit(webhook={"url": f"http://{host}/"})
            worker.run("a")
            return task_id

        deliverer = make_deliverer(Sender())
        first = ended("dead.example")
        (webhook,) = outbox.take(1, silence_seconds=3600)
        deliverer.deliver(webhook)
        dead = [ended("dead.example") for _ in range(MAX_CONCURRENT)]
        ended("alive.example")
        while not called.is_set():
            deliverer.deliver_due()
        num_later = 1 + MAX_CONCURRENT - MAX_UNPROVEN
        wait_for(lambda: redis_client.zcard(keys.OUTBOX_DUE) == num_later, "the rest is postponed")
        over.set()
        deliverer.wait_idle()
        assert len(waiting) == 1 + MAX_UNPROVEN
        # Those that were postponed have not been tried.
        tries = [redis_client.hget(keys.run(task_id), "webhook_tries") for task_id in (first, *dead)]
        assert tries.count(b"1") == 1 + MAX_UNPROVEN
        assert tries.count(None) == MAX_CONCURRENT - MAX_UNPROVEN
        assert redis_client.zcard(keys.OUTBOX_DUE) == 1 + MAX_CONCURRENT

    def test_a_slow_receiver_times_out(
        self,
        submit: Submit,
        worker: HandWorker,
        receiver: Receiver,
        outbox: Outbox,
        make_deliverer: MakeDeliverer,
        outcomes: Outcomes,
    ) -> None:
        receiver.will(say())
        submit(webhook={"url": receiver.url()})
        worker.run("a")
        deliverer = make_deliverer(Poster(allow_private=True, seconds=0.2))
        (webhook,) = outbox.take(1, silence_seconds=3600)
        deliverer.deliver(webhook)
        assert outcomes() == (0, 1, 0)
