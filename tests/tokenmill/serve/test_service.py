"""`tokenmill serve` as a process, with a real Redis server; worker and API are fakes."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import redis

from tests.conftest import free_port
from tests.tokenmill.serve.served import WITH_FAKES, Served
from tokenmill.cli.main import MISUSED
from tokenmill.serve.checks import check_address, check_distinct, check_installed
from tokenmill.serve.errors import CannotServe
from tokenmill.serve.state_directory import SELF
from tokenmill.settings.errors import SettingError

Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Served] = []

    def start_one(**settings: str) -> Served:
        runs.append(Served(tmp_path, WITH_FAKES, settings))
        return runs[-1]

    yield start_one
    for served in runs:
        served.end()


def two_free_ports() -> int:
    """The first of two consecutive ports, below the range of ephemeral ports."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000, 2):
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue
    raise AssertionError("no two ports in a row are free")


def position(lines: list[str], part: str) -> int:
    return next(number for number, line in enumerate(lines) if part in line)


def test_it_prints_addresses_and_how_to_submit(start: Start) -> None:
    served = start(TOKENMILL_MODEL="tiny").wait_until_ready()
    shown = "\n".join(served.text())
    redis_url = served.state.address("redis-url")

    assert f"Tokenmill is ready at {served.url}; the API is described at {served.url}/docs" in shown
    assert f"serve  | Redis at {redis_url}; loading" in shown
    assert f"curl -s {served.url}/v1/tasks -H 'Content-Type: application/json' -d '{{" in shown
    assert 'submit --stream --chat --temperature 0 "' in shown
    assert f"worker | model tiny redis {redis_url}" in shown
    assert served.state.address("api-url") == served.url


def test_the_printed_commands_mention_a_needed_key_but_not_its_value(start: Start) -> None:
    shown = "\n".join(start(TOKENMILL_API_KEYS="alice:a-secret").wait_until_ready().text())

    assert shown.count('-H "Authorization: Bearer $TOKENMILL_API_KEY"') == 1
    assert "secret" not in shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_stops_api_worker_and_redis_in_that_order(start: Start, number: int) -> None:
    served = start().wait_until_ready()
    known = served.state.processes()

    served.signal(number)

    assert served.wait() == 0
    lines = served.text()
    order = ["api    | bye", "api has stopped", "worker | bye", "worker has stopped", "redis has stopped"]
    positions = [position(lines, part) for part in order]
    assert positions == sorted(positions)
    assert not any(process.is_alive() for process in known.values())
    assert served.state.address("redis-url") is None


def test_a_second_run_in_the_same_directory_is_refused(start: Start) -> None:
    first = start().wait_until_ready()

    second = start()

    assert second.wait() == 1
    message = f"Error: a tokenmill serve (pid {first.process.pid}) already uses .tokenmill at {first.url}"
    assert second.text()[-1].startswith(message)
    assert len(second.text()) == 1


def test_a_port_in_use_is_reported_before_anything_starts(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        served = start(TOKENMILL_PORT=str(port))

        assert served.wait() == 1
    assert f"Error: port {port} of 127.0.0.1: Address already in use" in served.text()[-1]
    assert "TOKENMILL_PORT" in served.text()[-1]
    assert not served.state.redis_log.exists()


def test_a_configured_redis_server_is_used_and_not_stopped(start: Start, redis_url: str) -> None:
    served = start(REDIS_URL=redis_url).wait_until_ready()
    assert served.state.address("redis-url") == redis_url
    assert "redis" not in served.state.processes()

    served.signal(signal.SIGINT)

    assert served.wait() == 0
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()


def test_a_configured_redis_server_must_answer(start: Start) -> None:
    served = start(REDIS_URL="redis://127.0.0.1:1/0")

    assert served.wait() == 4
    assert "Error: REDIS_URL: no Redis server answers at redis://127.0.0.1:1/0" in served.text()[-1]


def test_data_is_kept_between_runs(start: Start) -> None:
    first = start().wait_until_ready()
    with redis.Redis.from_url(str(first.state.address("redis-url"))) as client:
        client.set("task", "kept")
    first.signal(signal.SIGINT)
    first.wait()

    second = start().wait_until_ready()
    with redis.Redis.from_url(str(second.state.address("redis-url"))) as client:
        assert client.get("task") == b"kept"


def test_the_next_run_has_redis_at_the_same_address(start: Start) -> None:
    """A reader that waits for Redis finds it again."""
    first = start().wait_until_ready()
    address = first.state.address("redis-url")
    first.signal(signal.SIGINT)
    first.wait()

    assert start().wait_until_ready().state.address("redis-url") == address


def test_other_users_can_read_nothing(start: Start) -> None:
    served = start().wait_until_ready()

    state = served.state.path
    everything = [state, *state.rglob("*")]
    assert state / "redis" / "redis.sock" in everything
    assert [path for path in everything if path.stat().st_mode & 0o077] == []


def test_a_run_after_a_killed_supervisor_stops_its_children(start: Start) -> None:
    """They keep running: a second Redis server over the same files would destroy them."""
    first = start().wait_until_ready()
    left = first.state.processes()
    with redis.Redis.from_url(str(first.state.address("redis-url"))) as client:
        client.set("task", "kept")
    os.kill(left.pop(SELF).pid, signal.SIGKILL)
    assert first.process.wait() == -signal.SIGKILL
    assert all(process.is_alive() for process in left.values())

    second = start(TOKENMILL_PORT=str(first.port)).wait_until_ready()

    assert not any(process.is_alive() for process in left.values())
    with redis.Redis.from_url(str(second.state.address("redis-url"))) as client:
        assert client.get("task") == b"kept"


@pytest.mark.parametrize("name", ["redis", "worker", "api"])
def test_a_killed_child_is_restarted(start: Start, name: str) -> None:
    served = start().wait_until_ready()
    before = served.state.processes()
    os.kill(before[name].pid, signal.SIGKILL)

    served.lines.wait_for(f"the {name} was ended by SIGKILL; starting it again")
    served.signal(signal.SIGINT)

    assert served.wait() == 0


def test_port_zero_chooses_a_free_port(start: Start) -> None:
    served = start(TOKENMILL_PORT="0").wait_until_ready()

    address = served.state.address("api-url")
    assert address is not None
    assert not address.endswith(":0")


@pytest.mark.parametrize("host", ["999.1.1.1", "192.0.2.1", "::9", "a..b"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(
        SettingError, match=f"TOKENMILL_METRICS_HOST: {host} is not an address of this machine"
    ):
        check_address(host, 0, "metrics_host", "metrics_port")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"TOKENMILL_PORT": "99999"}, "TOKENMILL_PORT must be a whole number from 0 to 65535"),
        ({"TOKENMILL_GRACE_SECONDS": "inf"}, "TOKENMILL_GRACE_SECONDS must be a number from"),
        ({"TOKENMILL_MAX_STREAMS": "300"}, "TOKENMILL_MAX_STREAMS must be below TOKENMILL_HTTP_THREADS"),
        ({"TOKENMILL_DEVICE": "gpu"}, "TOKENMILL_DEVICE must be auto or cpu or cuda, not 'gpu'"),
        ({"TOKENMILL_API_KEYS": "secret"}, "TOKENMILL_API_KEYS must be entries `tenant:key`"),
        ({"TOKENMILL_API_KEYS_FILE": "missing"}, "TOKENMILL_API_KEYS_FILE must be a file that can be read"),
        ({"TOKENMILL_WEBHOOK_SECRET": "secret"}, "TOKENMILL_WEBHOOK_SECRET must be whsec_ and"),
        ({"TOKENMILL_HOST": "999.1.1.1"}, "TOKENMILL_HOST: 999.1.1.1 is not an address of this machine"),
    ],
)
def test_a_wrong_setting_is_found_before_anything_starts(
    start: Start, settings: dict[str, str], message: str
) -> None:
    served = start(**settings)

    assert served.wait() == MISUSED
    assert len(served.text()) == 1
    assert message in served.text()[0]
    assert not served.state.redis_log.exists()


def test_two_services_on_one_port_are_found_before_anything_starts(start: Start) -> None:
    port = str(free_port())
    served = start(TOKENMILL_PORT=port, TOKENMILL_METRICS_PORT=port)

    assert served.wait() == MISUSED
    assert f"TOKENMILL_PORT and TOKENMILL_METRICS_PORT are both {port}" in served.text()[-1]
    assert not served.state.redis_log.exists()


@pytest.mark.parametrize(
    ("api", "metrics", "are_distinct"),
    [
        (("127.0.0.1", 8000), ("127.0.0.1", 9400), True),
        (("127.0.0.1", 8000), ("127.0.0.2", 8000), True),
        (("::", 8000), ("127.0.0.1", 8000), True),
        (("127.0.0.1", 8000), ("localhost", 8000), False),
        (("0.0.0.0", 8000), ("127.0.0.1", 8000), False),
        (("::1", 8000), ("::", 8000), False),
    ],
)
def test_two_services_on_one_port_need_distinct_addresses(
    api: tuple[str, int], metrics: tuple[str, int], are_distinct: bool
) -> None:
    with nullcontext() if are_distinct else pytest.raises(SettingError):
        check_distinct(api, metrics)


def test_a_process_that_refuses_its_settings_is_a_wrong_setting(start: Start) -> None:
    served = start(TOKENMILL_MODEL="unsupported")

    assert served.wait() == MISUSED
    assert served.text()[-1] == "Error: the worker ended with exit code 78; its last line: no such model"
    assert not any("starting it again" in line for line in served.text())


def test_several_workers_have_names_and_ports_of_their_own(start: Start) -> None:
    served = start(TOKENMILL_WORKERS="2").wait_until_ready()
    shown = "\n".join(served.text())

    assert list(served.state.processes()) == [SELF, "api", "worker-1", "worker-0", "redis"]
    assert "  worker-0: metrics at a free port\n" in shown
    assert "worker-1 | model None" in shown
    served.signal(signal.SIGINT)
    assert served.wait() == 0
    lines = served.text()
    assert position(lines, "api has stopped") < position(lines, "worker-0 has stopped")
    assert position(lines, "worker-1 has stopped") < position(lines, "redis has stopped")


def test_each_cuda_device_has_a_worker(start: Start, tmp_path: Path) -> None:
    """The driver's program is a fake, and so is torch's record of its build."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: GPU-a)'\necho 'GPU 1: A (UUID: GPU-b)'\n")
    program.chmod(0o755)
    port = two_free_ports()

    served = start(
        PATH=f"{program.parent}:{os.environ['PATH']}", TOKENMILL_METRICS_PORT=str(port), FAKE_CUDA="1"
    ).wait_until_ready()

    shown = "\n".join(served.text())
    assert f"  worker-0 on GPU-a: metrics at http://127.0.0.1:{port}/metrics\n" in shown
    assert f"  worker-1 on GPU-b: metrics at http://127.0.0.1:{port + 1}/metrics\n" in shown
    assert "worker-1 | device GPU-b" in shown


def test_an_unknown_variable_is_reported_before_an_address_is_refused(start: Start) -> None:
    served = start(TOKENMILL_HOTS="127.0.0.1", TOKENMILL_HOST="999.1.1.1")

    assert served.wait() == MISUSED
    assert "did you mean TOKENMILL_HOST?" in served.text()[0]
    assert "TOKENMILL_HOST: 999.1.1.1 is not an address" in served.text()[-1]


def test_an_unknown_variable_is_reported_once_and_not_passed_on(start: Start) -> None:
    served = start(TOKENMILL_MODLE="tiny").wait_until_ready()

    reports = [line for line in served.text() if "TOKENMILL_MODLE" in line]
    assert reports == [
        "serve  | TOKENMILL_MODLE is not a setting and is ignored; did you mean TOKENMILL_MODEL?"
    ]
    environment = Path(f"/proc/{served.state.processes()['worker'].pid}/environ").read_bytes()
    assert b"TOKENMILL_MODLE" not in environment


def test_a_supervised_process_exits_on_unusable_settings(start: Start) -> None:
    served = start(TOKENMILL_HOLD_UNUSABLE="1").wait_until_ready()

    for name in ("worker", "api"):
        environment = Path(f"/proc/{served.state.processes()[name].pid}/environ").read_bytes().split(b"\0")
        assert b"TOKENMILL_HOLD_UNUSABLE=false" in environment


def test_a_missing_package_is_reported() -> None:
    with pytest.raises(CannotServe, match="no_such_module is not installed, which the worker needs"):
        check_installed({"worker": "no_such_module"})
