"""Runs the service that `tokenmill serve` starts: Redis (its own if none is named), the workers and the API.

Everything that can be checked is checked before a process is started. `supervisor.py` restarts and stops the
processes.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokenmill.client.sync_client import Client
from tokenmill.process.temporary_directory import NoTemporaryDirectory, check_temporary_directory
from tokenmill.protocol.redis_url import hide_password
from tokenmill.serve import embedded_redis
from tokenmill.serve.announcement import announcement
from tokenmill.serve.checks import check_address, check_distinct, check_installed, check_server, free_port
from tokenmill.serve.child_processes import ChildSpec
from tokenmill.serve.cuda_devices import find_cuda_devices
from tokenmill.serve.errors import CannotServe, FatalExit
from tokenmill.serve.state_directory import SELF, StateDirectory
from tokenmill.serve.stop_signals import StopRequested, StopSignals
from tokenmill.serve.supervisor import Supervisor
from tokenmill.serve.take_over import take_over
from tokenmill.serve.worker_plan import PlannedWorker, description, plan_workers
from tokenmill.settings.declarations import VARIABLES, ServeSettings
from tokenmill.settings.errors import SettingError
from tokenmill.settings.unknown import unknown_variables, warnings

EXTRA_STOP_SECONDS = 15.0
"""What a process needs to exit once its own grace period is over."""
_READY_TIMEOUT_SECONDS = 2.0
#: BSD's EX_CONFIG: a setting is wrong, or the model cannot be served.
_EX_CONFIG = 78

PrintLine = Callable[[str, str], None]


def serve(
    state: StateDirectory, settings: ServeSettings, environ: Mapping[str, str], print_line: PrintLine
) -> None:
    """Run the service until a stop is requested, then stop all of it.

    Raises `SettingError`, `CannotServe` and `RedisUnavailable`, also after everything has been stopped.
    """
    with StopSignals() as signals:
        lock = take_over(state, print_line)
        supervisor = Supervisor(state, lock, signals, print_line)
        try:
            with suppress(StopRequested):
                _Service(supervisor, signals, state, settings, environ, print_line).run()
            print_line(SELF, "stopping; Ctrl-C again does not wait for unfinished tasks, and nothing is lost")
        except FatalExit as error:
            raise SettingError(str(error)) from error
        finally:
            supervisor.stop()
            os.close(lock)


def process_command(name: str) -> tuple[str, ...]:
    """How the API and a worker are started. `-P`: a folder `api` in the current directory is not imported."""
    return (sys.executable, "-P", "-m", name)


@dataclass(frozen=True)
class _Service:
    """One run. `environ`: the environment of `tokenmill serve` itself."""

    supervisor: Supervisor
    signals: StopSignals
    state: StateDirectory
    settings: ServeSettings
    environ: Mapping[str, str]
    print_line: PrintLine

    def run(self) -> None:
        # First, because a mistyped name may be the reason why a check below fails.
        for line in warnings(self.environ, VARIABLES):
            self.print_line(SELF, line)
        self._check_machine()
        port = self.settings.port or free_port()
        workers = self._plan_workers()
        self._check_addresses(port, workers)
        redis_url = self._find_redis()
        api_url = f"http://{_reachable(self.settings.host)}:{port}"
        self.supervisor.record.set_address("redis-url", redis_url)
        self.supervisor.record.set_address("api-url", api_url)
        self.print_line(
            SELF,
            f"Redis at {hide_password(redis_url)}; loading the model. Ctrl-C stops everything; unfinished"
            " tasks resume at the next start",
        )
        self._start_processes(workers, redis_url, port)
        with Client(api_url, api_key="", timeout=_READY_TIMEOUT_SECONDS) as client:
            self.supervisor.watch(client.is_ready, lambda: self._announce(api_url, workers))

    def _check_machine(self) -> None:
        """Packages, a directory for temporary files, and files that settings name."""
        check_server()
        check_installed({"worker": "torch", "api": "flask"})
        try:
            check_temporary_directory()
        except NoTemporaryDirectory as error:
            raise SettingError(str(error)) from None
        self.settings.check_files()

    def _plan_workers(self) -> list[PlannedWorker]:
        return plan_workers(
            self.settings.workers,
            self.settings.metrics_port,
            () if self.settings.device == "cpu" else find_cuda_devices(self.environ),
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            self.environ,
        )

    def _check_addresses(self, port: int, workers: list[PlannedWorker]) -> None:
        host, metrics_host = self.settings.host, self.settings.metrics_host
        check_address(host, port, "host", "port")
        for worker in workers:
            check_address(metrics_host, worker.metrics_port, "metrics_host", "metrics_port")
            check_distinct((host, port), (metrics_host, worker.metrics_port))

    def _find_redis(self) -> str:
        """The URL of the server in the settings, else of a new one on the data of earlier runs."""
        if "redis_url" in self.settings.model_fields_set:
            embedded_redis.check_reachable(self.settings.redis_url)
            return self.settings.redis_url
        data, log, socket_file = self.state.redis_data, self.state.redis_log, self._socket_file()
        url = embedded_redis.socket_url(socket_file)
        child = self.supervisor.start(embedded_redis.server_spec(data, log, socket_file))
        embedded_redis.wait_until_ready(url, log, lambda: child.returncode is None, self.signals.wait_or_stop)
        return url

    def _socket_file(self) -> Path:
        try:
            return embedded_redis.socket_path(self.state.redis_data)
        except OSError as error:
            raise CannotServe(
                f"the path of {self.state.path} is too long for a socket, and no directory for temporary"
                f" files can be written ({error.strerror}); choose a shorter one with TOKENMILL_STATE_DIR, or"
                " set TMPDIR"
            ) from error

    def _start_processes(self, workers: list[PlannedWorker], redis_url: str, port: int) -> None:
        # A process whose settings cannot be used must end, so that the supervisor notices.
        chosen = {"redis_url": redis_url, "port": port, "hold_unusable": False}
        if self.settings.files_url is None:
            chosen["files_url"] = str(self.state.files.resolve())
        environment = {
            **self.environ,
            **self.settings.model_copy(update=chosen).to_environment(),
            "PYTHONUNBUFFERED": "1",
        }
        # `serve` has warned of these; each process would repeat the warning.
        for name in unknown_variables(self.environ, VARIABLES):
            del environment[name]
        for worker in workers:
            self.supervisor.start(self._worker(worker, environment))
        self.supervisor.start(self._api(environment))

    def _worker(self, planned: PlannedWorker, environment: Mapping[str, str]) -> ChildSpec:
        return ChildSpec(
            name=planned.name,
            command=process_command("worker"),
            environment={**environment, **planned.environment},
            stop_seconds=self.settings.grace_seconds + EXTRA_STOP_SECONDS,
            fatal_exit_codes=frozenset({_EX_CONFIG}),
            stop_group="worker",
            while_stopping="finishes tasks for up to TOKENMILL_GRACE_SECONDS and returns the rest",
        )

    def _api(self, environment: Mapping[str, str]) -> ChildSpec:
        return ChildSpec(
            name="api",
            command=process_command("api"),
            environment=environment,
            stop_seconds=self.settings.http_grace_seconds + EXTRA_STOP_SECONDS,
            fatal_exit_codes=frozenset({_EX_CONFIG}),
            while_stopping="finishes open requests for up to TOKENMILL_HTTP_GRACE_SECONDS",
            # Tasks are in Redis, and clients whose connection ends reconnect.
            kill_on_second_request=True,
        )

    def _announce(self, api_url: str, workers: list[PlannedWorker]) -> None:
        metrics = [description(each, _reachable(self.settings.metrics_host)) for each in workers]
        needs_key = bool(self.settings.keyring)
        for line in announcement(api_url, metrics, needs_key=needs_key):
            self.print_line("", line)


def _reachable(host: str) -> str:
    """The address at which a server that listens on `host` is reached from this machine."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - recognised, not bound
    return f"[{local}]" if ":" in local else local
