"""Fixtures for every room. Redis is a real server, started once for a run of the tests."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Before torch is imported anywhere: OpenMP threads fight badly on a loaded machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before Triton is imported anywhere, and torch imports it: kernels are run on the CPU by its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import pytest
import redis

from tests.instruction_sets import report
from tokenmill.process import logs
from tokenmill.serve.embedded_redis import find_redis_server

# Nothing is timed: on a loaded machine any example may take long.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# structlog's loggers write to `logging`, where `caplog` finds them.
logs.configure("debug")


def pytest_report_header() -> str:
    return report()


START_SECONDS = 120.0
"""A watchdog: a server starts in a fraction of a second, and in several on a loaded machine."""


@dataclass(frozen=True)
class RedisServer:
    """A server of its own for the tests, empty and thrown away afterwards."""

    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_redis(directory: Path, port: int) -> RedisServer:
    """Start a server with append-only on, as `tokenmill serve` does, and wait until it answers."""
    process = subprocess.Popen(
        [
            find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory),
            "--appendonly", "yes", "--save", "",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    server = RedisServer(port, process)
    deadline = time.monotonic() + START_SECONDS
    with redis.Redis.from_url(server.url) as client:
        while time.monotonic() < deadline:
            try:
                client.ping()
            except redis.ConnectionError:
                if process.poll() is not None:
                    raise RuntimeError(f"the Redis server ended with {process.returncode}") from None
                time.sleep(0.01)
            else:
                return server
    process.kill()
    process.wait()
    raise RuntimeError(f"the Redis server does not answer within {START_SECONDS:.0f} s")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    directory = Path(tempfile.mkdtemp(prefix="tokenmill-test-"))
    server = start_redis(directory, free_port())
    yield server
    server.process.kill()
    server.process.wait()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """An empty database."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client
