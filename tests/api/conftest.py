"""The API on a real Redis, and a worker that tests control, which calls the store as the real one does."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
import redis
from prometheus_client import CollectorRegistry

from api.app import ApiApp, create_app
from api.webhooks.deliverer import Deliverer, Sender
from api.webhooks.http_post import Poster
from monitoring.webhooks import OUTCOMES, WebhookMetrics
from tests.api.api_client import ApiClient, client_of
from tests.api.running_server import Server
from tests.api.webhooks.delivering import KEY, Clock
from tests.api.webhooks.receiver import Receiver, receiving
from tests.conftest import RedisServer
from tokenmill.protocol.messages import GenerateRequest, LogEntry, TaskError, Usage
from tokenmill.protocol.records import Claimed, ModelCard, Settlement, WorkerRecord, Write
from tokenmill.protocol.store.outbox import Outbox
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings
from worker.preparation import read_job

CARD = ModelCard(
    model="SmolLM2-135M-Instruct",
    vocab_size=1000,
    max_model_len=100,
    max_prompt_tokens=80,
    has_chat_template=True,
    fingerprint="f",
)


Submit = Callable[..., str]
WorkerState = Literal["loading", "ready", "draining", "stalled"]
StartServer = Callable[..., Server]
MakeApp = Callable[[ApiSettings], ApiApp]
Deliver = Callable[..., int]
Outcomes = Callable[[], tuple[float | None, ...]]


class MakeDeliverer(Protocol):
    def __call__(
        self, sender: Sender | None = None, outbox: Outbox = ..., jitter: Callable[[], float] = ...
    ) -> Deliverer: ...


class HandWorker:
    """Performs each step of a worker when the test says so."""

    def __init__(self, store: TaskStore, slug: str) -> None:
        self.store = store
        self.slug = slug
        self.owned: dict[str, Claimed] = {}
        self.lengths: dict[str, int] = {}

    def claim(self, max_tasks: int = 1) -> list[str]:
        claimed = self.store.claim(self.slug, worker="hand", max_tasks=max_tasks, lease_seconds=60)
        for task in claimed:
            self.owned[task.task_id] = task
            self.lengths[task.task_id] = task.num_entries
        return [task.task_id for task in claimed]

    def start(self, task_id: str, prompt_tokens: int = 3) -> None:
        facts = {"scheduled": "1", "prompt_tokens": str(prompt_tokens)}
        self.store.publish([self.write(task_id, facts=facts)])

    def say(self, task_id: str, *words: str) -> None:
        first = self.lengths[task_id]
        entries = tuple(LogEntry.of_token(first + i, word) for i, word in enumerate(words))
        self.store.publish([self.write(task_id, entries=entries)])
        self.lengths[task_id] += len(words)

    def finish(self, task_id: str, reason: str = "stop", error: TaskError | None = None) -> None:
        done = self.lengths[task_id]
        end = LogEntry.of_end("", reason, usage=Usage(prompt_tokens=3, completion_tokens=done), error=error)
        settlement = Settlement(
            status="failed" if error or reason == "timeout" else "completed",
            reason=reason,
            result="{}",
            prompt_tokens=3,
            completion_tokens=done,
        )
        self.store.publish([self.write(task_id, entries=(end,), settlement=settlement)])
        self.lengths[task_id] += 1

    def request(self, task_id: str) -> GenerateRequest:
        """The request of a claimed task, as the worker reads it."""
        return read_job(self.owned[task_id].data)

    def publish(self, task_id: str, *entries: LogEntry) -> None:
        self.store.publish([self.write(task_id, entries=entries)])
        self.lengths[task_id] += len(entries)

    def run(self, *words: str) -> str:
        """Claim the next task, generate the words and finish it."""
        (task_id,) = self.claim()
        self.start(task_id)
        self.say(task_id, *words)
        self.finish(task_id)
        return task_id

    def report(self, state: WorkerState = "ready", detail: str = "") -> None:
        record = WorkerRecord(
            name="hand", model="m", slug=self.slug, state=state, detail=detail, started_at=1.0
        )
        self.store.put_worker(record, ttl_seconds=60)

    def write(self, task_id: str, **parts: Any) -> Write:
        """A write for a task that this worker owns, after the entries that it has written."""
        claimed = self.owned[task_id]
        return Write(task_id=task_id, owner=claimed.owner, first_seq=self.lengths[task_id], **parts)


@pytest.fixture
def settings(redis_url: str) -> ApiSettings:
    return ApiSettings(redis_url=redis_url)


@pytest.fixture
def make_app() -> Iterator[MakeApp]:
    """Creates applications and closes them at the end."""
    apps: list[ApiApp] = []

    def make(settings: ApiSettings) -> ApiApp:
        apps.append(create_app(settings))
        return apps[-1]

    yield make
    for app in apps:
        app.parts.hub.close()
        app.parts.step_feeds.close()


@pytest.fixture
def app(settings: ApiSettings, make_app: MakeApp) -> ApiApp:
    return make_app(settings)


@pytest.fixture
def client(app: ApiApp) -> ApiClient:
    return client_of(app)


@pytest.fixture
def store(redis_client: redis.Redis) -> TaskStore:
    return TaskStore(redis_client)


@pytest.fixture
def worker(store: TaskStore, settings: ApiSettings) -> HandWorker:
    return HandWorker(store, settings.slug)


@pytest.fixture
def card(store: TaskStore, settings: ApiSettings) -> ModelCard:
    store.put_model_card(settings.slug, CARD)
    return CARD


@pytest.fixture
def submit(client: ApiClient) -> Submit:
    """Submits a task and returns its id."""

    def post(**fields: object) -> str:
        reply = client.post("/v1/tasks", json={"prompt": "hello", **fields})
        assert reply.status_code == 202, reply.text
        return str(reply.json["id"])

    return post


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers with environment variables and stops them at the end."""
    with contextlib.ExitStack() as stack:

        def start(**environ: str) -> Server:
            server = Server(redis_url, tmp_path, **environ)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture(scope="module")
def server(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that do not stop it. It sends no heartbeat during a test."""
    server = Server(redis_server.url, tmp_path_factory.mktemp("home"), TOKENMILL_HEARTBEAT_SECONDS="600")
    yield server
    server.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def outbox(redis_client: redis.Redis) -> Outbox:
    return Outbox(redis_client)


@pytest.fixture
def clock(redis_client: redis.Redis) -> Clock:
    return Clock(redis_client)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def make_deliverer(
    store: TaskStore, outbox: Outbox, registry: CollectorRegistry, clock: Clock
) -> MakeDeliverer:
    metrics = WebhookMetrics(registry)

    def make(
        sender: Sender | None = None,
        outbox: Outbox = outbox,
        jitter: Callable[[], float] = lambda: 0.0,
    ) -> Deliverer:
        sender = sender or Poster(allow_private=True, seconds=5)
        return Deliverer(outbox, store, sender, [KEY], metrics, jitter=jitter, now=clock)

    return make


@pytest.fixture
def outcomes(registry: CollectorRegistry) -> Outcomes:
    """Returns the number of webhooks delivered, failed and given up."""

    def count() -> tuple[float | None, ...]:
        name = "tokenmill_webhook_deliveries_total"
        return tuple(registry.get_sample_value(name, {"outcome": outcome}) for outcome in OUTCOMES)

    return count


@pytest.fixture
def deliver(make_deliverer: MakeDeliverer, outbox: Outbox) -> Deliver:
    """Delivers everything that is due in the calling thread and returns the number of webhooks."""
    deliverer = make_deliverer()

    def run(silence_seconds: float = 3600) -> int:
        due = outbox.take(10, silence_seconds=silence_seconds)
        for webhook in due:
            deliverer.deliver(webhook)
        return len(due)

    return run
