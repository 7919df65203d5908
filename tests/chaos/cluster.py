"""The service as it runs in earnest: one Redis with append-only on, one API, two workers, a supervisor.

Law: whatever ends is started again, at the same address; what was started is ended with the cluster. Knows no
request and decides no fault.
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

from tests.chaos.hooks import SECRET, Receiver
from tests.chaos.program import Program
from tests.conftest import RedisServer, start_redis

TEND_SECONDS = 0.1
LEASE_SECONDS = 1.5
STOP_SECONDS = 30.0
CLOCK_SKEWS = (0.0, 7200.0)
"""How far each worker's clock is ahead of Redis's: hosts never agree."""
API_CLOCK_SKEW = -5400.0
SKEWED_CLOCK = Path(__file__).parent / "skewed_clock"
LIMITS = {
    "TOKENMILL_DTYPE": "float32",
    # Few slots, and blocks for about two of the longest requests: workers must preempt.
    "TOKENMILL_MAX_NUM_SEQS": "5",
    "TOKENMILL_MAX_NUM_BATCHED_TOKENS": "64",
    "TOKENMILL_BLOCK_SIZE": "16",
    "TOKENMILL_NUM_KV_BLOCKS": "44",
    # What is not done by then is handed back, which is what is to be tried.
    "TOKENMILL_GRACE_SECONDS": "0.5",
    "TOKENMILL_HTTP_GRACE_SECONDS": "1",
    "TOKENMILL_WEBHOOK_SECRET": SECRET,
    "TOKENMILL_WEBHOOK_ALLOW_PRIVATE": "true",
}


class Cluster:
    """Serves the model in `model_dir`; logs and Redis's files go below `directory`."""

    def __init__(self, model_dir: Path, directory: Path, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self.lease_seconds = lease_seconds
        # A worker that is stopped for some leases is to go on.
        self.stall_seconds = max(6.0, 3 * lease_seconds)
        self.receiver = Receiver()
        self.complaints: list[str] = []
        self._directory = directory
        self._redis_port = quiet_port()
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
        self._supervisor = threading.Thread(target=self._tend, name="supervisor", daemon=True)

    @property
    def redis_url(self) -> str:
        return f"redis://127.0.0.1:{self._redis_port}/0"

    @property
    def programs(self) -> list[Program]:
        return [self.api, *self.workers]

    def start(self) -> None:
        """Returns at once; `wait_until_well` waits."""
        self.start_redis()
        for program in self.programs:
            program.start()
        self._supervisor.start()

    def are_workers_well(self) -> bool:
        return all(worker.is_well() for worker in self.workers)

    def wait_until_well(self, seconds: float) -> bool:
        """Whether all programs are within `seconds`."""
        return until(lambda: all(program.is_well() for program in self.programs), seconds)

    def start_redis(self) -> None:
        self._redis = start_redis(self._directory, self._redis_port)
        with self.admin() as client:
            # With `everysec` the server may hold writes back for two seconds while the disk is busy, and
            # answers all the same: what is to be seen here are the faults of Tokenmill.
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
        """A new client, for a fault or a look; it tries again by itself."""
        return redis.Redis.from_url(self.redis_url)

    def stop(self) -> None:
        """All programs are told to end, then Redis. What does not end well is complained of."""
        self._closing.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for program in self.programs:
            program.terminate(STOP_SECONDS)
        self.complaints += [text for program in self.programs for text in program.complaints]
        self.complaints += self.receiver.complaints
        self.close()

    def close(self) -> None:
        """Kill whatever is left."""
        self._closing.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        for program in self.programs:
            program.retire()
        if self._redis is not None:
            self.kill_redis()
        self.receiver.close()

    def _tend(self) -> None:
        while not self._closing.wait(TEND_SECONDS):
            for program in self.programs:
                program.tend()

    def _program(self, module: str, name: str, health: str, env: Mapping[str, str]) -> Program:
        port = quiet_port()
        env = {**self._env, "TOKENMILL_PORT": str(port), "TOKENMILL_METRICS_PORT": str(port), **env}
        log = self._directory / f"{name}.log"
        return Program(module, name, port=port, health=health, env=env, log=log)


def _clock(skew_seconds: float) -> dict[str, str]:
    """The environment of a process on a host whose clock is so far ahead."""
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


def quiet_port() -> int:
    """A free port below those that the kernel takes for outgoing connections.

    While a server is away, somebody who calls there could otherwise be connected to himself and keep the
    port from it.
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
