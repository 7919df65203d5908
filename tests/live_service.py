"""The whole service as processes, for tests: Redis, a worker with a tiny model, the API.

Whatever the test does, the processes are stopped in the order API, worker, Redis.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.conftest import RedisServer, free_port, start_redis

ROOT = Path(__file__).parent.parent
WATCHDOG_SECONDS = 180.0
TERMINAL = ("completed", "failed", "cancelled")


def wait_for(condition: Callable[[], Any], what: str, seconds: float = WATCHDOG_SECONDS) -> Any:
    """The first true value of `condition`. Raises AssertionError with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {seconds} s still not: {what}"
        time.sleep(0.05)
    return value


@dataclass(frozen=True)
class Reply:
    """An HTTP reply of any status."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def http(method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
    """One HTTP call. `body` is sent as JSON. Raises OSError if there is no reply."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    request.method = method
    try:
        with urllib.request.urlopen(request, timeout=WATCHDOG_SECONDS) as reply:
            return Reply(reply.status, reply.headers, reply.read())
    except urllib.error.HTTPError as reply:
        with reply:
            return Reply(reply.code, reply.headers, reply.read())


@dataclass(frozen=True)
class Process:
    """A process of the service. `log`: its output."""

    popen: "subprocess.Popen[bytes]"
    log: Path
    url: str

    def is_ready(self) -> bool:
        """Raises AssertionError with the end of the log if the process has ended."""
        assert self.popen.poll() is None, f"ended with {self.popen.returncode}:\n{self.tail()}"
        try:
            return http("GET", f"{self.url}/readyz").status == 200
        except OSError:
            return False

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def stop(self, seconds: float = 60) -> None:
        """Send SIGTERM and wait. Kills the process and raises AssertionError if it does not end."""
        self.popen.terminate()
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"did not end within {seconds} s of SIGTERM:\n{self.tail()}") from None

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


class LiveService:
    """Redis, an API and a worker that serve the model in `model_dir`. Also a context manager.

    Files are written below `tmp_path`. `env` is added to the environment of worker and API. `worker` is the
    one started last; `start_worker` starts more. `redis_url`: a server that the test manages.
    """

    def __init__(
        self,
        model_dir: Path,
        tmp_path: Path,
        env: Mapping[str, str] | None = None,
        redis_url: str | None = None,
    ) -> None:
        self.directory = tmp_path
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")},
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TOKENMILL_MODEL": str(model_dir),
            "TOKENMILL_HOST": "127.0.0.1",
            **(env or {}),
        }
        self._redis: RedisServer | None = None
        self._redis_url = redis_url
        self.api: Process | None = None
        self.workers: list[Process] = []

    @property
    def redis_url(self) -> str:
        assert self._redis_url is not None, "not started"
        return self._redis_url

    @property
    def api_url(self) -> str:
        assert self.api is not None, "not started"
        return self.api.url

    @property
    def worker(self) -> Process:
        return self.workers[-1]

    def start(self) -> "LiveService":
        """Returns when the API reports that the service is ready."""
        try:
            if self._redis_url is None:
                self._redis = start_redis(self.directory, free_port())
                self._redis_url = self._redis.url
            self.start_worker(wait=False)
            self.start_api(free_port())
            wait_for(self._is_ready, "the API answers /readyz with 200")
        except BaseException:
            self.kill()
            raise
        return self

    def start_api(self, port: int) -> None:
        """Start an API. Does not wait for it."""
        self.api = self._run("api", f"http://127.0.0.1:{port}", {"TOKENMILL_PORT": str(port)})

    def restart_api(self) -> None:
        """Kill the API and start it again at its address. Does not wait for it."""
        assert self.api is not None, "not started"
        self.api.kill()
        self.start_api(int(self.api_url.rpartition(":")[2]))

    def start_worker(self, *, wait: bool = True, env: Mapping[str, str] | None = None) -> Process:
        """Start another worker process with its own metrics port. `wait`: until it is ready."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        worker = self._run("worker", url, {"TOKENMILL_METRICS_PORT": str(port), **(env or {})})
        self.workers.append(worker)
        if wait:
            wait_for(worker.is_ready, "the worker answers /readyz with 200")
        return worker

    def kill_worker(self) -> None:
        """Send SIGKILL to the last worker, as a crash."""
        self.worker.kill()

    def stop(self) -> None:
        """Stop API, workers and Redis. Raises AssertionError if one does not end on SIGTERM."""
        try:
            for process in filter(None, [self.api, *self.workers]):
                process.stop()
        finally:
            self.kill()

    def kill(self) -> None:
        for process in filter(None, [self.api, *self.workers]):
            process.kill()
        if self._redis is not None:
            self._redis.process.kill()
            self._redis.process.wait()

    def __enter__(self) -> "LiveService":
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def call(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Call the API."""
        return http(method, self.api_url + path, body, headers)

    def submit(self, **fields: Any) -> str:
        """Submit a task. Returns its id; raises AssertionError if it is not accepted."""
        reply = self.call("POST", "/v1/tasks", fields)
        assert reply.status == 202, reply.body
        return str(reply.json["id"])

    def task(self, task_id: str) -> Any:
        reply = self.call("GET", f"/v1/tasks/{task_id}")
        assert reply.status == 200, reply.body
        return reply.json

    def wait_task(self, task_id: str) -> Any:
        """Wait for the end of the task. Returns the task."""

        def ended() -> Any:
            task = self.task(task_id)
            return task if task["status"] in TERMINAL else None

        return wait_for(ended, f"task {task_id} ends")

    def _is_ready(self) -> bool:
        assert self.worker.popen.poll() is None, f"the worker ended:\n{self.worker.tail()}"
        return self.api is not None and self.api.is_ready()

    def _run(self, module: str, url: str, env: Mapping[str, str]) -> Process:
        log = self.directory / f"{module}-{len(self.workers)}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=ROOT,
                env={**self._env, "REDIS_URL": self.redis_url, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Process(popen, log, url)
