"""Redis fails during streams: the API reports it, no process exits, and all recover by themselves."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import RedisServer, free_port, start_redis
from tests.end_to_end.test_failover import LIMITS, NUM_TASKS, NUM_TOKENS, Reader, greedy, sse_ids
from tests.live_service import LiveService, Reply, wait_for
from tests.tiny_models import save_model
from tokenmill.protocol import keys

UNREACHABLE = ("127.0.0.1", "1")


class Server:
    """The Redis server of the service, controlled by the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._server: RedisServer = start_redis(directory, free_port())
        self.url = self._server.url

    def client(self) -> "redis.Redis":
        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        self._server.process.kill()
        self._server.process.wait()

    def restart(self) -> None:
        self._server = start_redis(self._directory, self._server.port)

    def send(self, number: signal.Signals) -> None:
        self._server.process.send_signal(number)


@contextmanager
def restarted(server: Server) -> Iterator[None]:
    server.kill()
    yield
    server.restart()


@contextmanager
def hung(server: Server) -> Iterator[None]:
    server.send(signal.SIGSTOP)
    yield
    server.send(signal.SIGCONT)


@contextmanager
def only_reading(server: Server) -> Iterator[None]:
    """As after a failover: the server is demoted to a replica."""
    with server.client() as client:
        client.replicaof(*UNREACHABLE)
        yield
        client.replicaof("NO", "ONE")


@contextmanager
def full(server: Server) -> Iterator[None]:
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) // 2)
        yield
        client.config_set("maxmemory", 0)


Fault = Callable[[Server], Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def service(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    directory = tmp_path_factory.mktemp("service")
    with LiveService(save_model(directory / "model"), directory, LIMITS, server.url) as running:
        yield running


class Streams:
    """Running tasks, each with a Redis reader and an SSE reader."""

    def __init__(self, service: LiveService, server: Server, pool: ThreadPoolExecutor) -> None:
        self._service = service
        self._worker = service.worker
        self.tasks = [service.submit(**greedy(number)) for number in range(NUM_TASKS)]
        self._readers = [Reader(pool, server.url, task) for task in self.tasks]
        self._streams: list[Future[list[int]]] = [pool.submit(sse_ids, service, task) for task in self.tasks]
        with server.client() as client:
            wait_for(lambda: all(client.xlen(keys.log(task)) > 20 for task in self.tasks), "they stream")
        for reader in self._readers:
            reader.wait_until_begun()

    def assert_whole(self) -> None:
        whole = list(range(NUM_TOKENS + 1))
        for task, reader, stream in zip(self.tasks, self._readers, self._streams, strict=True):
            assert reader.seqs() == whole
            assert stream.result(180) == whole
            ended = self._service.wait_task(task)
            assert (ended["status"], ended["usage"]["completion_tokens"]) == ("completed", NUM_TOKENS)
        assert self._service.worker is self._worker
        assert self._worker.popen.poll() is None


@pytest.mark.parametrize("fault", [restarted, hung, only_reading, full])
def test_redis_fails_and_comes_back(service: LiveService, server: Server, fault: Fault) -> None:
    """redis-py#1573, open-webui#28910, rq#1653, durabull#64: workers and subscribers exited or hung."""
    with ThreadPoolExecutor(2 * NUM_TASKS) as pool:
        streams = Streams(service, server, pool)
        with fault(server):
            refused = wait_for(lambda: asked(service, 503), "a submission is refused")
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json["error"]["code"]
        accepted = wait_for(lambda: asked(service, 202), "a submission is accepted again")
        streams.assert_whole()
        assert service.wait_task(accepted.json["id"])["status"] == "completed"
        wait_for(lambda: service.call("GET", "/readyz").status == 200, "it is ready again")


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
def test_connections_are_cut_repeatedly(service: LiveService, server: Server, kind: str) -> None:
    """redis-py#1572: a subscriber received nothing after its connection was closed."""
    with ThreadPoolExecutor(2 * NUM_TASKS) as pool, server.client() as client:
        streams = Streams(service, server, pool)
        num_cut = 0
        while num_cut < 30 and client.zcard(keys.LEASES):
            num_cut += client.client_kill_filter(_type=kind, skipme=True)
        streams.assert_whole()
    assert num_cut >= 5


def asked(service: LiveService, status: int) -> Reply | None:
    """The reply to a small task if it has this status; during a transition other statuses are correct too."""
    reply = service.call("POST", "/v1/tasks", {"prompt_token_ids": [5, 6], "max_tokens": 3})
    assert reply.status in (202, 503)
    return reply if reply.status == status else None
