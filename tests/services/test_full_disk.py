"""A state directory on a file system that is full for a while, with real mounts.

Needs a mount namespace, which root always has. redis#1522.
"""

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.acknowledged_writes import check_kept, push_until_it_ends
from tests.live_service import wait_for
from tests.tokenmill.serve.served import WITH_FAKES, Served
from tokenmill.serve.embedded_redis import socket_url
from tokenmill.serve.state_directory import StateDirectory

pytestmark = pytest.mark.services

MOUNT = 'mount -t tmpfs -o size=24m,mode=700 tmpfs "$0" && exec "$@"'


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path, since the length of a socket's path is limited."""
    path = Path(tempfile.mkdtemp(prefix="tm-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def served(directory: Path) -> Iterator[Served]:
    state = directory / ".tokenmill"
    state.mkdir()
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    served = Served(directory, WITH_FAKES, within=[*namespace, "sh", "-c", MOUNT, str(state)])
    served.state = StateDirectory(Path(f"/proc/{served.process.pid}/root{state}"))
    yield served
    served.end()


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 10, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        path.with_name("more").write_bytes(b"x")


def test_a_full_disk_loses_nothing(served: Served) -> None:
    served.wait_until_ready()
    url = socket_url(served.state.redis_data / "redis.sock")
    filler = served.state.path / "filler"
    fill(filler)

    num_acknowledged = push_until_it_ends(url)
    served.lines.wait_for("redis cannot be written: No space left on device")
    # If a child dies now, the record of processes cannot be written either.
    worker = served.state.processes()["worker"]
    os.kill(worker.pid, signal.SIGKILL)
    served.lines.wait_for(".tokenmill cannot be written: No space left on device; the service continues")
    assert served.process.poll() is None

    filler.unlink()
    check_kept(url, num_acknowledged)
    wait_for(lambda: served.state.processes()["worker"] != worker, "the restart is recorded")
    served.signal(signal.SIGINT)
    assert served.wait() == 0
