"""The whole service behind a Sentinel: its master dies in the middle of streams, and a replica takes over."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis

from tests.live_service import LiveService, Reply, wait_for
from tests.sentinels import watched
from tests.tiny_models import save_model
from tokenmill.client.streams import TokenStream
from tokenmill.protocol import keys
from tokenmill.protocol.messages import Event

NUM_TASKS = 4
NUM_TOKENS = 400
LIMITS = {"TOKENMILL_DTYPE": "float32", "TOKENMILL_LEASE_SECONDS": "5", "TOKENMILL_MAX_NUM_SEQS": "8"}


class Reader:
    """Follows a task in Redis in a thread of `pool`."""

    def __init__(self, pool: ThreadPoolExecutor, url: str, task_id: str) -> None:
        self._has_begun = threading.Event()
        self._events = pool.submit(self._follow, url, task_id)

    def wait_until_begun(self) -> None:
        """Wait for the first event: a reader tolerates outages only once it has begun."""
        assert self._has_begun.wait(180)

    @property
    def has_ended(self) -> bool:
        return self._events.done()

    def seqs(self) -> list[int]:
        return [event.seq for event in self._events.result(180)]

    def _follow(self, url: str, task_id: str) -> list[Event]:
        events = []
        for event in TokenStream(url, task_id, silence_seconds=1):
            events.append(event)
            self._has_begun.set()
        return events


def sse_ids(service: LiveService, task_id: str) -> list[int]:
    """Events as an EventSource sees them: it reconnects after a 503 during the failover."""

    def stream() -> Reply | None:
        reply = service.call("GET", f"/v1/tasks/{task_id}/events")
        assert reply.status in (200, 503), reply.body
        return reply if reply.status == 200 else None

    body = wait_for(stream, "the events are served").body.decode()
    return [int(line[3:]) for line in body.splitlines() if line.startswith("id:")]


def greedy(number: int) -> dict[str, Any]:
    return {
        "prompt_token_ids": [10 + number, 20, 30],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


def test_the_master_is_killed_during_streams(tmp_path: Path) -> None:
    """redis-py#1573, rq#1653: after a failover workers exited, or kept their connection to the old master."""
    model_dir = save_model(tmp_path / "model")
    with (
        watched(tmp_path) as servers,
        LiveService(model_dir, tmp_path, LIMITS, servers.url) as service,
        ThreadPoolExecutor(2 * NUM_TASKS) as pool,
        redis.Redis.from_url(servers.master.url) as master,
    ):
        tasks = [service.submit(**greedy(number)) for number in range(NUM_TASKS)]
        readers = [Reader(pool, servers.url, task) for task in tasks]
        streams = [pool.submit(sse_ids, service, task) for task in tasks]
        wait_for(lambda: all(master.xlen(keys.log(task)) > 20 for task in tasks), "all streams have begun")
        servers.replicate()
        assert not any(reader.has_ended for reader in readers), "a stream ended before the kill"
        servers.kill_master()
        servers.wait_for_promotion()

        for task, reader, stream in zip(tasks, readers, streams, strict=True):
            seqs = reader.seqs()
            assert seqs == list(range(len(seqs)))
            assert stream.result(120) == seqs
            ended = service.wait_task(task)
            assert (ended["status"], ended["usage"]["completion_tokens"]) == ("completed", NUM_TOKENS)
        assert service.worker.popen.poll() is None
        again = [service.submit(**greedy(number)) for number in range(NUM_TASKS)]
        outputs = [service.wait_task(task)["outputs"] for task in again]
        assert outputs == [service.task(task)["outputs"] for task in tasks]
