"""The service as in production: Redis with an append-only file, one API, two workers, a supervisor.

A process that ends is restarted at the same address. All processes end with the cluster.
"""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import redis

from tests.chaos.program import Program
from tests.chaos.webhook_receiver import SECRET, Receiver
from tests.conftest import RedisServer, start_redis

SUPERVISE_SECONDS = 0.1
LEASE_SECONDS = 1.5
STOP_SECONDS = 30.0
CLOCK_SKEWS = (0.0, 7200.0)
"""Seconds by which each worker's clock is ahead of Redis's. Clocks of hosts always differ."""
API_CLOCK_SKEW = -5400.0
SKEWED_CLOCK = Path(__file__).parent / "skewed_clock"
LIMITS = {
    "TOKENMILL_DTYPE": "float32",
    # Few slots, and blocks for about two of the longest requests: workers must preempt.
    "TOKENMILL_MAX_NUM_SEQS": "5",
    "TOKENMILL_MAX_NUM_BATCHED_TOKENS": "64",
    "TOKENMILL_BLOCK_SIZE": "16",
    "TOKENMILL_NUM_KV_BLOCKS": "44",
    # Short, so that unfinished tasks are handed back.
    "TOKENMILL_GRACE_SECONDS": "0.5",
    "TOKENMILL_HTTP_GRACE_SECONDS": "1",
    "TOKENMILL_WEBHOOK_SECRET": SECRET,
    "TOKENMILL_WEBHOOK_ALLOW_PRIVATE": "true",
}


class Cluster:
    """Serves the model in `model_dir`. Logs and Redis's files are written below `directory`."""

    def __init__(self, model_dir: Path, directory: Path, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        # A worker that is stopped for a few leases must resume.
        self.stall_seconds = max(6.0, 3 * lease_seconds)
        self.receiver = Receiver()
        self.complaints: list[str] = []
        self._directory = directory
        self._redis_port = server_port()
        self._redis: RedisServer | None = None
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")},
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "REDIS_URL": self.redis_url,
            "TOKENMILL_MODEL": str(model_dir),
            "TOKENMILL_LEASE_SECONDS": str(lease_seconds),
            "TOKENMILL_STALL_SECONDS": str(self.stall_seconds),
            **LIMITS,
        }
        self.api = self._program("api", "api", "/livez", _clock(API_CLOCK_SKEW))
        self.workers = [
            self._program("worker", f"worker-{number}", "/readyz", _clock(skew))
            for number, skew in enumerate(CLOCK_SKEWS)
        ]
        self._closing = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self._redis_port}/0"

    @property
    def programs(self) -> list[Program]:
        return [self.api, *self.workers]

    def start(self) -> None:
        """Start all processes without waiting for them."""
        self.start_redis()
        for program in self.programs:
            program.start()
        self._supervisor.start()

    def are_workers_healthy(self) -> bool:
        return all(worker.is_healthy() for worker in self.workers)

    def wait_until_healthy(self, seconds: float) -> bool:
        """Whether all programs become healthy within `seconds`."""
        return until(lambda: all(program.is_healthy() for program in self.programs), seconds)

    def start_redis(self) -> None:
        self._redis = start_redis(self._directory, self._redis_port)
        with self.admin() as client:
            # With `everysec` a server with a busy disk acknowledges writes up to two seconds before it
            # stores them. The losses to be found here are those of Tokenmill.
            client.config_set("appendfsync", "always")

    def kill_redis(self) -> None:
        assert self._redis is not None
        self._redis.process.kill()
        self._redis.process.wait()

    def freeze_redis(self) -> None:
        assert self._redis is not None
        self._redis.process.send_signal(signal.SIGSTOP)

    def thaw_redis(self) -> None:
        assert self._redis is not None
        self._redis.process.send_signal(signal.SIGCONT)

    def admin(self) -> "redis.Redis":
        """A new client, which retries by itself."""
        return redis.Redis.from_url(self.redis_url)

    def stop(self) -> None:
        """Stop all programs, then Redis. Programs that do not stop properly are complaints."""
        self._closing.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for program in self.programs:
            program.terminate(STOP_SECONDS)
        self.complaints += [text for program in self.programs for text in program.complaints]
        self.complaints += self.receiver.complaints
        self.close()

    def close(self) -> None:
        """Kill the remaining processes."""
        self._closing.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for program in self.programs:
            program.close()
        if self._redis is not None:
            self.kill_redis()
        self.receiver.close()

    def _supervise(self) -> None:
        while not self._closing.wait(SUPERVISE_SECONDS):
            for program in self.programs:
                program.restart_if_ended()

    def _program(self, module: str, name: str, health: str, env: Mapping[str, str]) -> Program:
        port = server_port()
        env = {**self._env, "TOKENMILL_PORT": str(port), "TOKENMILL_METRICS_PORT": str(port), **env}
        log = self._directory / f"{name}.log"
        return Program(module, name, port=port, health=health, env=env, log=log)


def _clock(skew_seconds: float) -> dict[str, str]:
    """The environment of a process on a host whose clock is ahead by `skew_seconds`."""
    path = os.pathsep.join(filter(None, [str(SKEWED_CLOCK), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "CLOCK_SKEW_SECONDS": str(skew_seconds)}


def until(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Whether `condition` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
    return True


def server_port() -> int:
    """A free port below the range of outgoing connections.

    Otherwise a client could connect to itself while the server is down, and occupy its port.
    """
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(20_000, 32_000)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
