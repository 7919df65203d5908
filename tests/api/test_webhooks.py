"""Webhooks from submission to receiver: what is sent, how often, and what becomes of it."""

import base64
import hashlib
import hmac
import json
import threading
from itertools import pairwise

import pytest
import redis
from prometheus_client import CollectorRegistry

from api import housekeeping
from api.receivers import MAX_IN_VAIN
from api.redis_clients import connect
from api.settings import ApiSettings
from api.webhook_post import Poster, PostFailed
from api.webhook_signature import parse_secrets
from api.webhook_url import parse_url
from api.webhooks import DELAYS, JITTER, MAX_AT_ONCE, MAX_TRIES, Deliverer
from monitoring.webhooks import OUTCOMES, WebhookMetrics
from tests.api.webhook_receiver import answer, close, receiving, say
from worker.protocol import keys
from worker.protocol.messages import TaskError
from worker.protocol.outbox import Outbox

KEY = b"k" * 32
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"


@pytest.fixture
def settings(redis_url):
    return ApiSettings(redis_url=redis_url, webhook_keys=parse_secrets(SECRET), webhook_allow_private=True)


@pytest.fixture
def receiver():
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def outbox(redis_client):
    return Outbox(redis_client)


class Clock:
    """Seconds since the epoch; tries are put off by it, and signed with it."""

    def __init__(self, client):
        self.client = client
        self.now = 1_800_000_000.0

    def __call__(self):
        return self.now

    def waits(self):
        """Seconds until the next try of each webhook that waits for one."""
        seconds, microseconds = self.client.time()
        due = self.client.zrange(keys.OUTBOX_DUE, 0, -1, withscores=True)
        return [score - seconds - microseconds / 1e6 for _, score in due]

    def turn(self, seconds):
        """So much time passes."""
        self.now += seconds
        for task_id in self.client.zrange(keys.OUTBOX_DUE, 0, -1):
            self.client.zincrby(keys.OUTBOX_DUE, -seconds, task_id)


@pytest.fixture
def clock(redis_client):
    return Clock(redis_client)


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def make_deliverer(store, outbox, registry, clock):
    metrics = WebhookMetrics(registry)

    def make(sender=None, outbox=outbox, jitter=lambda: 0.0):
        sender = sender or Poster(allow_private=True, seconds=5)
        return Deliverer(outbox, store, sender, [KEY], metrics, jitter=jitter, now=clock)

    return make


@pytest.fixture
def outcomes(registry):
    def count():
        name = "tokenmill_webhook_deliveries_total"
        return tuple(registry.get_sample_value(name, {"outcome": outcome}) for outcome in OUTCOMES)

    return count


@pytest.fixture
def deliver(make_deliverer, outbox):
    """Deliver all that is due, here and now; gives how many that were."""
    deliverer = make_deliverer()

    def run(silence_seconds=3600):
        due = outbox.take(10, silence_seconds=silence_seconds)
        for webhook in due:
            target = parse_url(webhook.url)
            assert deliverer._receivers.enter(target)
            deliverer.deliver(webhook, target)
        return len(due)

    return run


def verified(call):
    """The event of a delivery whose signature is right, checked as a receiver does."""
    signed = f"{call.headers['webhook-id']}.{call.headers['webhook-timestamp']}.".encode() + call.body
    expected = base64.b64encode(hmac.digest(KEY, signed, hashlib.sha256)).decode()
    assert call.headers["webhook-signature"] == f"v1,{expected}"
    assert call.headers["content-type"] == "application/json"
    return json.loads(call.body)


class TestWhatIsSent:
    def test_the_task_as_polling_shows_it(self, client, submit, worker, receiver, deliver, clock, outcomes):
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
        assert event["data"] == client.get(f"/v1/tasks/{task_id}").json
        assert event["data"]["outputs"][0]["text"] == "Hell\u00f6\n"
        assert deliver(silence_seconds=0) == 0
        assert outcomes() == (1, 0, 0)

    def test_a_failed_one(self, submit, worker, receiver, deliver):
        task_id = submit(webhook={"url": receiver.url()})
        worker.claim()
        worker.say(task_id, "a")
        worker.finish(task_id, "error", TaskError(type="server_error", code="engine_error", message="broke"))
        deliver()
        event = verified(receiver.next())
        assert (event["type"], event["data"]["error"]["code"]) == ("task.failed", "engine_error")

    def test_a_cancelled_one(self, client, submit, receiver, deliver):
        task_id = submit(webhook={"url": receiver.url()})
        client.delete(f"/v1/tasks/{task_id}")
        deliver()
        assert verified(receiver.next())["type"] == "task.cancelled"

    def test_nothing_before_the_end_and_nothing_without_being_asked(self, submit, worker, receiver, deliver):
        submit()
        worker.run("a")
        task_id = submit(webhook={"url": receiver.url()})
        worker.claim()
        worker.say(task_id, "a")
        assert deliver() == 0


class TestTries:
    def test_it_fails_first_and_then_succeeds(self, submit, worker, receiver, deliver, clock, outcomes):
        """Each try has a time and a signature of its own, and the same id and body."""
        receiver.will(answer(500), close, answer(302, "Location: /elsewhere"), answer(200))
        task_id = submit(webhook={"url": receiver.url()})
        worker.run("a")
        for delay in DELAYS[:3]:
            assert deliver() == 1
            assert deliver(silence_seconds=0) == 0
            clock.turn(delay)
        assert deliver() == 1
        calls = [receiver.next() for _ in range(4)]
        assert len({call.body for call in calls}) == 1
        assert {call.headers["webhook-id"] for call in calls} == {f"msg_{task_id}"}
        times = [int(call.headers["webhook-timestamp"]) for call in calls]
        assert [later - earlier for earlier, later in pairwise(times)] == list(DELAYS[:3])
        for call in calls:
            verified(call)
        assert outcomes() == (1, 3, 0)
        assert clock.waits() == []

    def test_eight_tries_over_a_day(self, submit, worker, receiver, deliver, clock, outcomes, redis_client):
        receiver.will(*[answer(503)] * MAX_TRIES)
        task_id = submit(webhook={"url": receiver.url()})
        worker.run("a")
        began = clock.now
        for delay in DELAYS:
            assert deliver() == 1
            assert clock.waits() == [pytest.approx(delay, abs=60)]
            # A minute more than that: Redis's own clock has gone on too.
            clock.turn(delay + 60)
        assert clock.now - began == pytest.approx(86_400, rel=0.05)
        assert deliver() == 1
        clock.turn(10**6)
        assert deliver(silence_seconds=0) == 0
        assert receiver.calls.qsize() == MAX_TRIES == 8
        assert outcomes() == (0, 7, 1)
        assert redis_client.xlen(keys.OUTBOX) == 0
        assert redis_client.ttl(keys.run(task_id)) <= 3600

    def test_what_failed_together_does_not_come_back_together(
        self, submit, worker, receiver, outbox, clock, make_deliverer
    ):
        receiver.will(answer(500), answer(500))
        shares = iter([0.0, 1.0])
        deliverer = make_deliverer(jitter=lambda: next(shares))
        for _ in range(2):
            submit(webhook={"url": receiver.url()})
            worker.run("a")
        for webhook in outbox.take(2, silence_seconds=3600):
            deliverer.deliver(webhook, enter(deliverer, webhook))
        first, second = sorted(clock.waits())
        assert second - first > DELAYS[0] * JITTER / 2

    def test_a_receiver_may_say_that_it_wants_no_more(self, submit, worker, receiver, deliver, outcomes):
        receiver.will(answer(410))
        submit(webhook={"url": receiver.url()})
        worker.run("a")
        deliver()
        assert deliver(silence_seconds=0) == 0
        assert outcomes() == (0, 0, 1)

    def test_a_private_address_is_not_told(self, submit, worker, receiver, outbox, make_deliverer, outcomes):
        """A name that stands for one is found out when it is looked up."""
        submit(webhook={"url": receiver.url()})
        worker.run("a")
        deliverer = make_deliverer(Poster(allow_private=False))
        (webhook,) = outbox.take(1, silence_seconds=3600)
        deliverer.deliver(webhook, enter(deliverer, webhook))
        assert receiver.calls.empty()
        assert outcomes() == (0, 1, 0)

    def test_the_log_does_not_tell_the_url(self, submit, worker, receiver, deliver, caplog):
        caplog.set_level("INFO")
        receiver.will(answer(500), answer(410))
        submit(webhook={"url": receiver.url("/secret?token=secret")})
        worker.run("a")
        deliver()
        assert "127.0.0.1" in caplog.text
        assert "secret" not in caplog.text


def enter(deliverer, webhook):
    target = parse_url(webhook.url)
    assert deliverer._receivers.enter(target)
    return target


class TestDeaths:
    def test_one_who_dies_before_it_is_noted_leaves_it_to_another(
        self, submit, worker, receiver, outbox, make_deliverer, outcomes, redis_client
    ):
        """The receiver hears twice, and can tell by the id."""

        class Dying(Outbox):
            def done(self, webhook):
                raise redis.ConnectionError("cut off")

        submit(webhook={"url": receiver.url()})
        worker.run("a")
        dying = make_deliverer(outbox=Dying(redis_client))
        (webhook,) = outbox.take(1, silence_seconds=3600)
        with pytest.raises(redis.ConnectionError):
            dying.deliver(webhook, enter(dying, webhook))
        assert outbox.take(1, silence_seconds=3600) == []
        heir = make_deliverer()
        (again,) = outbox.take(1, silence_seconds=0)
        heir.deliver(again, enter(heir, again))
        first, second = receiver.next(), receiver.next()
        assert first.headers["webhook-id"] == second.headers["webhook-id"]
        assert first.body == second.body
        assert outcomes() == (1, 0, 0)
        assert outbox.take(1, silence_seconds=0) == []

    def test_a_fault_of_ours_is_told_and_tried_again(
        self, submit, worker, receiver, make_deliverer, outbox, caplog
    ):
        class Faulty:
            def post(self, target, headers, body):
                raise ZeroDivisionError

        submit(webhook={"url": receiver.url()})
        worker.run("a")
        deliverer = make_deliverer(Faulty())
        (webhook,) = outbox.take(1, silence_seconds=3600)
        deliverer._places.acquire()
        deliverer._run(webhook, enter(deliverer, webhook))
        assert "a fault of this service" in caplog.text
        assert outbox.take(1, silence_seconds=0) == [webhook]

    def test_redis_is_away(self, make_deliverer, store):
        gone = Outbox(connect("redis://127.0.0.1:1/0"))
        deliverer = make_deliverer(outbox=gone)
        for _ in range(2 * MAX_AT_ONCE):
            assert housekeeping.deliver(deliverer) == housekeeping.WEBHOOK_PAUSE_SECONDS


class TestManyAtOnce:
    def test_several_deliverers_share_the_work(self, submit, worker, receiver, make_deliverer, redis_url):
        ids = [submit(webhook={"url": receiver.url()}) for _ in range(40)]
        for _ in ids:
            worker.run("a")
        deliverers = [make_deliverer(outbox=Outbox(connect(redis_url))) for _ in range(3)]
        begun = 0
        while begun < len(ids):
            begun += sum(deliverer.deliver_due() for deliverer in deliverers)
        heard = sorted(receiver.next().headers["webhook-id"] for _ in ids)
        assert heard == sorted(f"msg_{task_id}" for task_id in ids)
        assert receiver.calls.empty()

    def test_a_receiver_that_does_not_answer_does_not_keep_others_waiting(
        self, submit, worker, make_deliverer, outbox, redis_client
    ):
        told, over = threading.Event(), threading.Event()
        waiting = []

        class Sender:
            def post(self, target, headers, body):
                if target.host == "alive.example":
                    told.set()
                    return 200
                waiting.append(target)
                if len(waiting) > 1:
                    over.wait(60)
                raise PostFailed("timed out")

        def ended(host):
            task_id = submit(webhook={"url": f"http://{host}/"})
            worker.run("a")
            return task_id

        deliverer = make_deliverer(Sender())
        first = ended("dead.example")
        (webhook,) = outbox.take(1, silence_seconds=3600)
        deliverer.deliver(webhook, enter(deliverer, webhook))
        dead = [ended("dead.example") for _ in range(MAX_AT_ONCE)]
        ended("alive.example")
        while not told.is_set():
            deliverer.deliver_due()
        over.set()
        for _ in range(MAX_AT_ONCE):
            deliverer._places.acquire()
        assert len(waiting) == 1 + MAX_IN_VAIN
        # Those that were put off have not been tried.
        tries = [redis_client.hget(keys.run(task_id), "webhook_tries") for task_id in (first, *dead)]
        assert tries.count(b"1") == 1 + MAX_IN_VAIN
        assert tries.count(None) == MAX_AT_ONCE - MAX_IN_VAIN
        assert redis_client.zcard(keys.OUTBOX_DUE) == 1 + MAX_AT_ONCE

    def test_a_slow_one_is_given_up_in_time(self, submit, worker, receiver, outbox, make_deliverer, outcomes):
        receiver.will(say())
        submit(webhook={"url": receiver.url()})
        worker.run("a")
        deliverer = make_deliverer(Poster(allow_private=True, seconds=0.2))
        (webhook,) = outbox.take(1, silence_seconds=3600)
        deliverer.deliver(webhook, enter(deliverer, webhook))
        assert outcomes() == (0, 1, 0)


class TestSubmission:
    def test_a_task_is_kept_until_its_webhook_is_delivered(
        self, client, submit, worker, receiver, deliver, redis_client
    ):
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
    def test_a_bad_one_is_refused_by_name(self, client, webhook, param, redis_client):
        reply = client.post("/v1/tasks", json={"prompt": "x", "webhook": webhook})
        assert (reply.status_code, reply.json["error"]["param"]) == (400, param)
        assert list(redis_client.scan_iter("tokenmill:run:*")) == []

    @pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "169.254.169.254", "localhost", "10.1.2.3:8080"])
    def test_a_private_address_is_refused_unless_it_is_allowed(self, redis_url, make_app, settings, host):
        body = {"prompt": "x", "webhook": {"url": f"http://{host}/"}}
        closed = ApiSettings(redis_url=redis_url, webhook_keys=settings.webhook_keys)
        reply = make_app(closed).test_client().post("/v1/tasks", json=body)
        assert reply.status_code == 400
        assert (reply.json["error"]["param"], reply.json["error"]["code"]) == (
            "webhook.url",
            "webhook_address",
        )
        assert make_app(settings).test_client().post("/v1/tasks", json=body).status_code == 202

    def test_without_a_secret_there_are_none(self, redis_url, make_app):
        """Nobody could tell them from anybody else's."""
        app = make_app(ApiSettings(redis_url=redis_url))
        body = {"prompt": "x", "webhook": {"url": "https://example.org/"}}
        reply = app.test_client().post("/v1/tasks", json=body)
        assert (reply.status_code, reply.json["error"]["code"]) == (400, "webhooks_disabled")
        assert "TOKENMILL_WEBHOOK_SECRET" in reply.json["error"]["message"]
        assert app.test_client().post("/v1/tasks", json={**body, "webhook": None}).status_code == 202

    def test_another_webhook_is_another_body(self, client):
        headers = {"Idempotency-Key": "k"}
        statuses = [
            client.post(
                "/v1/tasks", json={"prompt": "x", "webhook": {"url": url}}, headers=headers
            ).status_code
            for url in ("https://example.org/a", "https://example.org/a", "https://example.org/b")
        ]
        assert statuses == [202, 202, 422]
