"""The Redis master dies in mid-stream and a Sentinel promotes the replica: nobody starts anything again.

What replication had not yet carried over when the master died is lost with it. Tokens and ends come again
from the worker; an accepted task would not, so the test waits until the tasks have been carried over.
"""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from transformers import AutoModelForCausalLM

from tests.conftest import RedisServer, free_port, start_redis
from tests.end_to_end.test_service import assert_ended_as_alone, greedy, logged, random_prompts
from tests.live_service import WATCHDOG_SECONDS, LiveService, wait_for
from tests.tiny_models import save_model
from tokenmill.embedded_redis import find_redis_server
from tokenmill.reader import TokenStream
from worker.protocol.messages import FinishedEvent

SERVICE = "mill"
LIMITS = {"TOKENMILL_DTYPE": "float32", "TOKENMILL_MAX_NUM_SEQS": "8", "TOKENMILL_LEASE_SECONDS": "2"}
NUM_TASKS = 8


@dataclass
class Replicated:
    """A master, its replica, and a Sentinel that watches them."""

    master: RedisServer
    replica: RedisServer
    sentinel: "subprocess.Popen[bytes]"
    url: str

    @property
    def new_master(self) -> "redis.Redis[bytes]":
        return redis.Redis.from_url(self.replica.url)

    def fail_over(self) -> None:
        """The master is gone at once; returns when the replica has been promoted."""
        self.master.process.kill()
        self.master.process.wait()
        with self.new_master as client:
            wait_for(lambda: client.info("replication")["role"] == "master", "the replica is promoted")


@contextmanager
def replicated(tmp_path: Path) -> Iterator[Replicated]:
    directories = [tmp_path / name for name in ("master", "replica")]
    for directory in directories:
        directory.mkdir()
    master, replica = (start_redis(directory, free_port()) for directory in directories)
    port = free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 500\nsentinel failover-timeout {SERVICE} 2000\n"
    )
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", str(master.port))
        wait_for(lambda: client.info("replication")["master_link_status"] == "up", "it replicates")
    sentinel = subprocess.Popen(
        [find_redis_server(), str(config), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with redis.Redis(port=port) as client:
            wait_for(lambda: _knows_the_replica(client), "the Sentinel knows both")
        yield Replicated(master, replica, sentinel, f"redis+sentinel://127.0.0.1:{port}/{SERVICE}/0")
    finally:
        for process in (sentinel, master.process, replica.process):
            process.kill()
            process.wait()


def _knows_the_replica(client: "redis.Redis[bytes]") -> bool:
    try:
        return bool(client.sentinel_slaves(SERVICE))
    except redis.RedisError:
        return False


@dataclass
class Listener:
    """Follows a task by our reader, as a program would."""

    url: str
    task_id: str
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for event in TokenStream(self.url, self.task_id, silence_seconds=2):
            self.events.append(event)

    def heard(self) -> list[Any]:
        self._thread.join(WATCHDOG_SECONDS)
        assert not self._thread.is_alive()
        return self.events


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def test_the_master_dies_in_mid_stream(model_dir: Path, tmp_path: Path) -> None:
    """redis-py#1573, open-webui#28910, rq#1653: workers and readers stayed deaf, or ended."""
    prompts, lengths = random_prompts(5, NUM_TASKS, 30), [300 + 10 * n for n in range(NUM_TASKS)]
    with (
        replicated(tmp_path) as servers,
        LiveService(model_dir, tmp_path, LIMITS, redis_url=servers.url) as service,
        servers.new_master as client,
    ):
        worker = service.worker
        ids = [service.submit(**greedy(prompt, n)) for prompt, n in zip(prompts, lengths, strict=True)]
        listeners = [Listener(servers.url, task_id) for task_id in ids]
        wait_for(lambda: logged(client, ids) > 10 * NUM_TASKS, "the replica has tokens of them")
        assert all(client.xlen(f"tokenmill:log:{task_id}") for task_id in ids)

        servers.fail_over()
        assert logged(client, ids) < sum(lengths), "it was in mid-stream"
        tasks = [wait_for(lambda one=task_id: ended(service, one), "it ends") for task_id in ids]
        late = service.wait_task(service.submit(**greedy(prompts[0], 5)))

        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager")
        assert_ended_as_alone(model, [*tasks, late], [*prompts, prompts[0]], [*lengths, 5])
        for listener, length in zip(listeners, lengths, strict=True):
            events = listener.heard()
            assert [event.seq for event in events] == list(range(length + 1)), "a gap or a double"
            assert isinstance(events[-1], FinishedEvent)
        assert service.workers == [worker]
        assert worker.popen.poll() is None
        assert client.zcard("tokenmill:leases") == 0


def ended(service: LiveService, task_id: str) -> Any:
    """The task once it has ended. While Redis is away the API says that, and when to come again."""
    reply = service.call("GET", f"/v1/tasks/{task_id}")
    if reply.status == 503:
        assert int(reply.headers["Retry-After"]) >= 1
        return None
    assert reply.status == 200
    return reply.json if reply.json["status"] == "completed" else None
