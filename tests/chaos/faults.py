"""Faults of processes and of Redis. Each is over when its function returns. None modifies stored data."""

import time
from collections.abc import Callable, Mapping
from random import Random

from tests.chaos.cluster import STOP_SECONDS, Cluster, until

Fault = Callable[[Cluster, Random], None]

ROOM_BYTES = 32 * 1024
"""Memory left to a full server: a few writes succeed, then none."""
UNREACHABLE = ("127.0.0.1", 1)
"""A master that does not exist."""
START_SECONDS = 60.0


def kill_worker(cluster: Cluster, chance: Random) -> None:
    """SIGKILL while it works."""
    chance.choice(cluster.workers).kill()


def kill_all_workers(cluster: Cluster, chance: Random) -> None:
    """SIGKILL to all: no worker is left to take over, so the API and its readers wait."""
    for worker in cluster.workers:
        worker.kill()


def freeze_worker(cluster: Cluster, chance: Random) -> None:
    """SIGSTOP until other workers have taken its tasks, then SIGCONT."""
    worker = chance.choice(cluster.workers)
    worker.freeze()
    time.sleep(cluster.lease_seconds * chance.uniform(1.3, 2.2))
    worker.thaw()


def pause_worker(cluster: Cluster, chance: Random) -> None:
    """SIGSTOP for about a lease or less: its tasks may be taken over or not."""
    worker = chance.choice(cluster.workers)
    worker.freeze()
    time.sleep(cluster.lease_seconds * chance.uniform(0.5, 1.1))
    worker.thaw()


def hang_worker(cluster: Cluster, chance: Random) -> None:
    """SIGSTOP for longer than a step may take: the watchdog ends it, or it has lost its tasks."""
    worker = chance.choice(cluster.workers)
    worker.expect_end()
    worker.freeze()
    time.sleep(cluster.stall_seconds + chance.uniform(1.5, 3.0))
    worker.thaw()


def drain_worker(cluster: Cluster, chance: Random) -> None:
    """SIGTERM: it finishes what it can and hands back the rest."""
    chance.choice(cluster.workers).terminate(STOP_SECONDS)


def stop_worker_twice(cluster: Cluster, chance: Random) -> None:
    """SIGTERM twice: it stops at once and hands back its tasks."""
    chance.choice(cluster.workers).terminate(STOP_SECONDS, times=2)


def restart_workers(cluster: Cluster, chance: Random) -> None:
    """A rolling restart: each worker is drained once the one before is healthy again."""
    for worker in cluster.workers:
        worker.terminate(STOP_SECONDS)
        until(worker.is_healthy, START_SECONDS, pause=0.2)


def fail_receiver(cluster: Cluster, chance: Random) -> None:
    """The receiver of webhooks replies with errors for a while."""
    cluster.receiver.is_failing = True
    time.sleep(chance.uniform(1.0, 3.0))
    cluster.receiver.is_failing = False


def kill_api(cluster: Cluster, chance: Random) -> None:
    """SIGKILL to the process or to its process group. Open streams break."""
    cluster.api.kill(whole_group=chance.random() < 0.5)


def drain_api(cluster: Cluster, chance: Random) -> None:
    cluster.api.terminate(STOP_SECONDS)


def cut_clients(cluster: Cluster, chance: Random) -> None:
    """Close every connection except subscriptions, during calls."""
    with cluster.admin() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def cut_subscribers(cluster: Cluster, chance: Random) -> None:
    with cluster.admin() as client:
        client.client_kill_filter(_type="pubsub", skipme=True)


def restart_redis(cluster: Cluster, chance: Random) -> None:
    """SIGKILL to the server. It restarts with the contents of its append-only file."""
    cluster.kill_redis()
    time.sleep(chance.uniform(0.0, 1.0))
    cluster.start_redis()


def hang_redis(cluster: Cluster, chance: Random) -> None:
    """The server answers nothing for longer than callers wait, and then does what it was asked."""
    cluster.freeze_redis()
    time.sleep(chance.uniform(2.1, 2.8))
    cluster.thaw_redis()


def fill_memory(cluster: Cluster, chance: Random) -> None:
    """No room for new data: with `noeviction` every write that needs some is refused."""
    with cluster.admin() as client:
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", used + ROOM_BYTES)
        try:
            time.sleep(chance.uniform(0.8, 1.6))
        finally:
            client.config_set("maxmemory", 0)


def demote_redis(cluster: Cluster, chance: Random) -> None:
    """As after a failover: the server that all are connected to is a read-only replica."""
    with cluster.admin() as client:
        client.replicaof(*UNREACHABLE)
        try:
            time.sleep(chance.uniform(0.6, 1.5))
        finally:
            client.replicaof("NO", "ONE")


TO_PROCESSES: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_worker, kill_all_workers, freeze_worker, pause_worker, hang_worker, drain_worker,
        stop_worker_twice, restart_workers, kill_api, drain_api, fail_receiver,
    )
}  # fmt: skip
"""Includes the receiver of webhooks."""
TO_REDIS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (cut_clients, cut_subscribers, restart_redis, hang_redis, fill_memory, demote_redis)
}
