"""Starts a Redis master, a replica and a Sentinel below one directory; ends them with the context."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.conftest import RedisServer, free_port, start_redis
from tests.live_service import wait_for
from tokenmill.serve.embedded_redis import find_redis_server

SERVICE = "mill"
DOWN_MILLISECONDS = 500


@dataclass(frozen=True)
class Watched:
    """`url`: through the Sentinel. `master` is the one that was so at the beginning."""

    url: str
    master: RedisServer
    replica: RedisServer

    def replicate(self) -> None:
        """Returns when the replica has what the master took so far."""
        with redis.Redis.from_url(self.master.url) as client:
            # Replication is one ordered stream: who has this has all that was written before.
            client.set("replicated", 1, px=1)
            wait_for(lambda: client.wait(1, 1000), "the replica follows")

    def kill_master(self) -> None:
        self.master.process.kill()
        self.master.process.wait()

    def wait_for_promotion(self) -> None:
        with redis.Redis.from_url(self.replica.url) as client:
            wait_for(lambda: client.role()[0] == b"master", "the replica is promoted")


@contextmanager
def watched(directory: Path) -> Iterator[Watched]:
    """Returns when the Sentinel knows the replica, so that it could promote it."""
    servers: list[RedisServer] = []
    sentinel: subprocess.Popen[bytes] | None = None
    try:
        for name in ("master", "replica"):
            (directory / name).mkdir()
            servers.append(start_redis(directory / name, free_port()))
        master, replica = servers
        with redis.Redis.from_url(replica.url) as client:
            client.replicaof("127.0.0.1", master.port)
        port = free_port()
        sentinel = _start_sentinel(directory, port, master.port)
        with redis.Redis(port=port) as client:
            wait_for(lambda: _knows_replica(client), "the Sentinel knows the replica")
        yield Watched(f"redis+sentinel://127.0.0.1:{port}/{SERVICE}", master, replica)
    finally:
        for process in [*(server.process for server in servers), *filter(None, [sentinel])]:
            process.kill()
            process.wait()


def _start_sentinel(directory: Path, port: int, master_port: int) -> "subprocess.Popen[bytes]":
    path = directory / "sentinel.conf"
    path.write_text(f"""\
port {port}
bind 127.0.0.1
dir {directory}
sentinel monitor {SERVICE} 127.0.0.1 {master_port} 1
sentinel down-after-milliseconds {SERVICE} {DOWN_MILLISECONDS}
sentinel failover-timeout {SERVICE} 5000
""")
    return subprocess.Popen(
        [find_redis_server(), str(path), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _knows_replica(client: "redis.Redis") -> bool:
    try:
        replicas = client.sentinel_slaves(SERVICE)
    except redis.ConnectionError:
        return False
    return any(replica["master-link-status"] == "ok" for replica in replicas)
