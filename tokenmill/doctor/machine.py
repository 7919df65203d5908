"""Checks the ports, the directories and their disks, and the clock."""

import os
import shutil
import time
from pathlib import Path

from tokenmill.doctor.finding import Finding, fail, human_bytes, ok, warn
from tokenmill.protocol.naming import EARLIEST_TASK_TIME
from tokenmill.serve.checks import check_address
from tokenmill.serve.errors import CannotServe
from tokenmill.settings.declarations import ServeSettings
from tokenmill.settings.errors import SettingError

_LITTLE_BYTES, _LEAST_BYTES = 5 * 2**30, 2**29


def check_ports(settings: ServeSettings, *, is_running: bool) -> list[Finding]:
    """`is_running`: the service of this directory runs, and has the ports."""
    if is_running:
        return [ok("ports", "used by the tokenmill serve of this directory, which is running")]
    return [
        _port(settings.host, settings.port, "host", "port"),
        _port(settings.metrics_host, settings.metrics_port, "metrics_host", "metrics_port"),
    ]


def _port(host: str, port: int, host_setting: str, port_setting: str) -> Finding:
    try:
        check_address(host, port, host_setting, port_setting)
    except (CannotServe, SettingError) as error:
        text, _, remedy = str(error).partition("; ")
        return fail("ports", text, remedy or "correct the address")
    return ok("ports", f"{host}:{port} is free" if port else f"{host}: any free port")


def check_directories(settings: ServeSettings) -> list[Finding]:
    """The state and the cache: writable, on a disk with room."""
    directories = dict.fromkeys(Path(name).absolute() for name in (settings.state_dir, settings.cache_dir))
    return [_directory(directory) for directory in directories]


def _directory(directory: Path) -> Finding:
    existing = next(each for each in (directory, *directory.parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return fail(
            "disk",
            f"{directory} cannot be written by this user",
            "choose other directories with TOKENMILL_STATE_DIR and TOKENMILL_CACHE_DIR",
        )
    free = shutil.disk_usage(existing).free
    text = f"{human_bytes(free)} free for {directory}"
    if free < _LITTLE_BYTES:
        return (fail if free < _LEAST_BYTES else warn)("disk", text, "free some space on this disk")
    return ok("disk", text)


def check_clock() -> list[Finding]:
    """Nothing, or that the clock is wrong. Redis is compared with it elsewhere."""
    if time.time() >= EARLIEST_TASK_TIME:
        return []
    return [fail("clock", f"this machine thinks that it is {time.ctime()}", "set its clock")]
