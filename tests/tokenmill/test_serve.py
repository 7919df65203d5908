"""`tokenmill serve` as a process, with a real Redis server; worker and API are fakes."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.tokenmill.served import WITH_FAKE_ROOMS, Served
from tokenmill.serve import check_installed, check_port
from tokenmill.state import SELF
from tokenmill.supervisor import CannotServe

Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    runs: list[Served] = []

    def start_one(**settings: str) -> Served:
        runs.append(Served(tmp_path, WITH_FAKE_ROOMS, settings))
        return runs[-1]

    yield start_one
    for served in runs:
        served.end()


def position(lines: list[str], part: str) -> int:
    return next(number for number, line in enumerate(lines) if part in line)


def test_it_says_where_to_look_and_how_to_submit(start: Start) -> None:
    served = start(TOKENMILL_MODEL="tiny").wait_until_ready()
    shown = "\n".join(served.text())
    redis_url = served.state.address("redis-url")

    assert f"API    {served.url}" in shown
    assert f"docs   {served.url}/docs" in shown
    assert f"Redis  {redis_url}" in shown
    assert f"curl -s {served.url}/v1/tasks -H 'Content-Type: application/json' -d '{{" in shown
    assert f"curl -s '{served.url}/v1/tasks/ID?wait=30'" in shown
    assert "submit --stream" in shown
    assert f"worker | model tiny redis {redis_url}" in shown
    assert served.state.address("api-url") == served.url


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


def test_a_second_one_in_the_same_directory_says_so(start: Start) -> None:
    first = start().wait_until_ready()

    second = start()

    assert second.wait() == 1
    told = f"Error: a tokenmill serve (pid {first.process.pid}) already uses .tokenmill at {first.url}"
    assert second.text()[-1].startswith(told)
    assert len(second.text()) == 1


def test_a_port_that_is_taken_is_told_before_anything_starts(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        served = start(TOKENMILL_PORT=str(port))

        assert served.wait() == 1
    assert f"Error: port {port} of 127.0.0.1: Address already in use" in served.text()[-1]
    assert "TOKENMILL_PORT" in served.text()[-1]
    assert not served.state.redis_log.exists()


def test_a_named_redis_server_is_used_and_left_alone(start: Start, redis_url: str) -> None:
    served = start(REDIS_URL=redis_url).wait_until_ready()
    assert served.state.address("redis-url") == redis_url
    assert "redis" not in served.state.processes()

    served.signal(signal.SIGINT)

    assert served.wait() == 0
    with redis.Redis.from_url(redis_url) as client:
        assert client.ping()


def test_a_named_redis_server_must_answer(start: Start) -> None:
    served = start(REDIS_URL="redis://127.0.0.1:1/0")

    assert served.wait() == 4
    assert "Error: REDIS_URL: no Redis server answers at redis://127.0.0.1:1/0" in served.text()[-1]


def test_data_outlives_a_run(start: Start) -> None:
    first = start().wait_until_ready()
    with redis.Redis.from_url(str(first.state.address("redis-url"))) as client:
        client.set("task", "kept")
    first.signal(signal.SIGINT)
    first.wait()

    second = start().wait_until_ready()
    with redis.Redis.from_url(str(second.state.address("redis-url"))) as client:
        assert client.get("task") == b"kept"


def test_the_next_start_copes_with_a_killed_supervisor(start: Start) -> None:
    """Its children live on: a second Redis server over the same files would destroy them."""
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
def test_a_child_that_is_killed_comes_back(start: Start, name: str) -> None:
    served = start().wait_until_ready()
    before = served.state.processes()
    os.kill(before[name].pid, signal.SIGKILL)

    served.lines.wait_for(f"the {name} was ended by SIGKILL; starting it again")
    served.signal(signal.SIGINT)

    assert served.wait() == 0


def test_any_free_port_will_do_for_zero(start: Start) -> None:
    served = start(TOKENMILL_PORT="0").wait_until_ready()

    address = served.state.address("api-url")
    assert address is not None
    assert not address.endswith(":0")


def test_a_port_out_of_range_is_told() -> None:
    with pytest.raises(CannotServe, match="TOKENMILL_PORT"):
        check_port("127.0.0.1", 70000, "TOKENMILL_PORT")


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(CannotServe, match="TOKENMILL_PORT"):
        check_port("192.0.2.1", 8000, "TOKENMILL_PORT")


def test_a_part_that_is_not_installed_is_told() -> None:
    with pytest.raises(CannotServe, match="no_such_module is not installed, which the worker needs"):
        check_installed({"worker": "no_such_module"})
