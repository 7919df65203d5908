"""Processes as pid 1 of a namespace, as in a container without an init process (sglang#16145).

Needs the permission to create namespaces, which root has.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gated_start import end, start_at_gate

pytestmark = pytest.mark.services
WATCHDOG_SECONDS = 120.0


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.mark.parametrize(
    ("room", "gate", "arguments"),
    [
        ("worker", "redis", ()),
        ("worker", "engine.execution.build", ()),
        ("api", "flask", ()),
        ("tokenmill", "click", ("serve",)),
    ],
)
def test_sigterm_during_the_startup_ends_it(
    program: Callable[[str], str], redis_url: str, room: str, gate: str, arguments: tuple[str, ...]
) -> None:
    namespace = [program("unshare"), "--pid", "--fork", "--mount-proc"]
    if os.geteuid() != 0:
        namespace.append("--map-root-user")
    env = {"REDIS_URL": redis_url, "TOKENMILL_METRICS_PORT": "0"}
    process = start_at_gate(room, gate, arguments=arguments, env=env, within=namespace)
    first = only_child(process.pid)
    assert Path(f"/proc/{first}/status").read_text().split("NSpid:")[1].split()[1] == "1"

    os.kill(first, signal.SIGTERM)

    try:
        assert process.wait(WATCHDOG_SECONDS) == 128 + signal.SIGTERM
    finally:
        end(process)
