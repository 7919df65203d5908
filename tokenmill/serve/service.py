"""What `tokenmill serve` runs: Redis (its own, if none is named), its workers, the API; and what it says.

Law: whatever can be found wrong is found before anything heavy is started. Knows which processes make up the
service; how they are kept up and stopped is the supervisor's.
"""

import errno
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from tokenmill import config
from tokenmill.client.http import Client
from tokenmill.process.temporary_directory import NoTemporaryDirectory, check_temporary_directory
from tokenmill.process.variables import unknown_variables, warnings
from tokenmill.protocol.redis_url import hide_password
from tokenmill.serve import embedded_redis
from tokenmill.serve.devices import cuda_devices
from tokenmill.serve.planned_workers import AUTO, PlannedWorker, description, plan_workers
from tokenmill.serve.processes import ChildSpec
from tokenmill.serve.signals import StopRequested, StopSignals
from tokenmill.serve.state import SELF, StateDirectory
from tokenmill.serve.supervisor import CannotServe, Supervisor, Unusable, take_over

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_METRICS_PORT = 9400
_DEFAULT_GRACE_SECONDS = 30.0
_DEFAULT_HTTP_GRACE_SECONDS = 10.0
#: What a room needs to end once its own grace period is over.
_EXTRA_SECONDS = 15.0
_READY_TIMEOUT_SECONDS = 2.0
#: BSD's EX_CONFIG: a setting is wrong, or the model is one that cannot be served.
_EX_CONFIG = 78
_FAULTS_OF_THE_PORT = frozenset({errno.EADDRINUSE, errno.EACCES})

Print = Callable[[str, str], None]


def serve(
    state: StateDirectory, settings: Mapping[str, str], environ: Mapping[str, str], print_line: Print
) -> None:
    """Run the service until a stop is asked for, then stop all of it.

    Raises `ConfigError`, `CannotServe` and `RedisUnavailable`, also after everything has been stopped.
    """
    with StopSignals() as signals:
        lock = take_over(state, print_line)
        supervisor = Supervisor(state, lock, signals, print_line)
        try:
            with suppress(StopRequested):
                _run(supervisor, signals, state, settings, environ, print_line)
            print_line(SELF, "stopping; Ctrl-C again does not wait for unfinished tasks, and nothing is lost")
        except Unusable as error:
            raise config.ConfigError(str(error)) from error
        finally:
            supervisor.stop()
            os.close(lock)


def _run(
    supervisor: Supervisor,
    signals: StopSignals,
    state: StateDirectory,
    settings: Mapping[str, str],
    environ: Mapping[str, str],
    print_line: Print,
) -> None:
    # First: a mistyped name may be the reason why an address below is refused.
    for line in warnings(environ):
        print_line(SELF, line)
    check_installed({"worker": "torch", "api": "flask"})
    try:
        check_temporary_directory()
    except NoTemporaryDirectory as error:
        raise config.ConfigError(str(error)) from None
    host = settings.get("host", DEFAULT_HOST)
    port = int(settings.get("port", DEFAULT_PORT)) or embedded_redis.free_port()
    metrics_host = settings.get("metrics_host", DEFAULT_HOST)
    workers = _workers(settings, environ)
    check_address(host, port, "host", "port")
    for each in workers:
        check_address(metrics_host, each.metrics_port, "metrics_host", "metrics_port")
        check_apart((host, port), (metrics_host, each.metrics_port))
    redis_url = _redis(supervisor, signals, state, settings.get("redis_url"))
    api_url = f"http://{_reachable(host)}:{port}"
    supervisor.record.put_address("redis-url", redis_url)
    supervisor.record.put_address("api-url", api_url)
    print_line(SELF, f"Redis at {hide_password(redis_url)}; loading the model")
    # A process that cannot work ends, so that the supervisor hears of it.
    decided = {"redis_url": redis_url, "port": str(port), "hold_unusable": "0"}
    unknown = unknown_variables(environ)
    # What was warned of above is not passed on, to be warned of by each process.
    known = {name: value for name, value in environ.items() if name not in unknown}
    given = {**known, **config.to_environment({**settings, **decided}), "PYTHONUNBUFFERED": "1"}
    for each in workers:
        supervisor.start(_worker(each, settings, given))
    supervisor.start(_api(settings, given))
    client = Client(url=api_url, timeout=_READY_TIMEOUT_SECONDS)
    needs_key = bool(settings.keys() & {"api_keys", "api_keys_file"})
    metrics = [description(each, _reachable(metrics_host)) for each in workers]
    supervisor.watch(client.is_ready, lambda: _announce(api_url, redis_url, metrics, needs_key, print_line))


def _workers(settings: Mapping[str, str], environ: Mapping[str, str]) -> list[PlannedWorker]:
    """Raises `ConfigError`."""
    # Of a device with a number, `cuda:1`, there is one.
    by_device = settings.get("device", "auto") in ("auto", "cuda")
    return plan_workers(
        settings.get("workers", AUTO),
        int(settings.get("metrics_port", DEFAULT_METRICS_PORT)),
        cuda_devices(environ) if by_device else (),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        environ,
    )


def _worker(planned: PlannedWorker, settings: Mapping[str, str], given: Mapping[str, str]) -> ChildSpec:
    grace = float(settings.get("grace_seconds", _DEFAULT_GRACE_SECONDS))
    return ChildSpec(
        name=planned.name,
        command=room_command("worker"),
        environment={**given, **planned.environment},
        stop_seconds=grace + _EXTRA_SECONDS,
        final_codes=frozenset({_EX_CONFIG}),
        stage="worker",
        stopping="finishes tasks for as long as TOKENMILL_GRACE_SECONDS and hands the rest back",
    )


def _api(settings: Mapping[str, str], given: Mapping[str, str]) -> ChildSpec:
    grace = float(settings.get("http_grace_seconds", _DEFAULT_HTTP_GRACE_SECONDS))
    return ChildSpec(
        name="api",
        command=room_command("api"),
        environment=given,
        stop_seconds=grace + _EXTRA_SECONDS,
        final_codes=frozenset({_EX_CONFIG}),
        stopping="lets open calls end for as long as TOKENMILL_HTTP_GRACE_SECONDS",
        # Tasks are in Redis, and a client that was cut off asks again.
        kill_hurried=True,
    )


def room_command(name: str) -> tuple[str, ...]:
    """`-P`: a folder of the same name in the current directory is not taken for the room."""
    return (sys.executable, "-P", "-m", name)


def check_installed(modules: Mapping[str, str]) -> None:
    """`modules`: room -> a module that it cannot do without. Raises `CannotServe`."""
    for name, module in modules.items():
        if find_spec(module) is None:
            raise CannotServe(
                f"{module} is not installed, which the {name} needs: pip install 'tokenmill[serve]'"
            )


def check_address(host: str, port: int, host_setting: str, port_setting: str) -> None:
    """Raises `ConfigError` if `host` is none of this machine's, `CannotServe` if `port` cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        # UnicodeError: of a name that cannot be one, as `a..b`.
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            if getattr(error, "errno", None) in _FAULTS_OF_THE_PORT:
                variable = config.BY_NAME[port_setting].variable
                raise CannotServe(
                    f"port {port} of {host}: {reason}; choose another with {variable}"
                ) from error
            variable = config.BY_NAME[host_setting].variable
            raise config.ConfigError(f"{variable}: {host} is no address of this machine: {reason}") from error


def check_apart(api: tuple[str, int], metrics: tuple[str, int]) -> None:
    """Two pairs of a host and a port that can be had. Raises `ConfigError` if not both can be at once."""
    if api[1] != metrics[1]:
        return
    first, second = (_ip_address(host) for host, _ in (api, metrics))
    every = first.version == second.version and (first.is_unspecified or second.is_unspecified)
    if every or first == second:
        raise config.ConfigError(
            f"TOKENMILL_PORT and TOKENMILL_METRICS_PORT are both {api[1]}; choose another for one of them"
        )


def _redis(supervisor: Supervisor, signals: StopSignals, state: StateDirectory, given: str | None) -> str:
    """The URL of the server to use: the one that is given, or a new one on the data of earlier runs."""
    if given:
        embedded_redis.check_reachable(given)
        return given
    socket_file = _socket_file(state)
    url = embedded_redis.socket_url(socket_file)
    child = supervisor.start(embedded_redis.server_spec(state.redis_data, state.redis_log, socket_file))
    embedded_redis.wait_until_ready(url, state.redis_log, lambda: child.returncode is None, signals.pause)
    return url


def _socket_file(state: StateDirectory) -> Path:
    try:
        return embedded_redis.socket_path(state.redis_data)
    except OSError as error:
        raise CannotServe(
            f"the path of {state.path} is too long for a socket, and no directory for temporary files can be "
            f"written ({error.strerror}); choose a shorter one with TOKENMILL_STATE_DIR, or set TMPDIR"
        ) from error


def _ip_address(host: str) -> IPv4Address | IPv6Address:
    return ip_address(host if ":" in host else socket.gethostbyname(host))


def _reachable(host: str) -> str:
    """The address at which a server that listens on `host` is reached from this machine."""
    local = {"0.0.0.0": DEFAULT_HOST, "::": "::1"}.get(host, host)  # noqa: S104 - recognised, not bound
    return f"[{local}]" if ":" in local else local


def _announce(
    api_url: str, redis_url: str, metrics: Sequence[str], needs_key: bool, print_line: Print
) -> None:
    # The key itself is none of ours to print.
    key = ' -H "Authorization: Bearer $TOKENMILL_API_KEY"' if needs_key else ""
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
    shown_metrics = "\n  ".join(metrics)
    text = f"""
Tokenmill is ready.
  API    {api_url}
  docs   {api_url}/docs
  Redis  {hide_password(redis_url)}
  {shown_metrics}

Submit a task, then poll it with the id from the answer:
  curl -s {api_url}/v1/tasks{key} -H 'Content-Type: application/json' -d '{body}'
  curl -s{key} '{api_url}/v1/tasks/ID?wait=30'

Or see its tokens as they come:
  {_own_command()} submit --stream --chat --temperature 0 "What is the capital of France?"

Ctrl-C stops everything; unfinished tasks go on at the next start.
"""
    for line in text.splitlines():
        print_line("", line)


def _own_command() -> str:
    """How this command can be typed again in this directory."""
    given = Path(sys.argv[0])
    if given.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m tokenmill"
    if shutil.which(given.name) == str(given):
        return given.name
    return shlex.quote(os.path.relpath(given) if given.is_relative_to(Path.cwd()) else str(given))
