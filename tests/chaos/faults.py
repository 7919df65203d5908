"""What is done to the service: each fault strikes and lifts itself before it returns.

Law: no fault touches what the service has stored. Knows the processes and the server, no request.
"""

import time
from collections.abc import Callable, Mapping
from random import Random

from tests.chaos.cluster import STOP_SECONDS, Cluster, until

Fault = Callable[[Cluster, Random], None]

ROOM_BYTES = 32 * 1024
"""Memory that a full server has left: a few writes go through, then none."""
NOBODY = ("127.0.0.1", 1)
"""A master that does not answer."""
START_SECONDS = 60.0


def kill_worker(cluster: Cluster, chance: Random) -> None:
    """kill -9 in the middle of its work."""
    chance.choice(cluster.workers).kill()


def kill_all_workers(cluster: Cluster, chance: Random) -> None:
    """Nobody is left who could take over; the API and its readers wait for the next."""
    for worker in cluster.workers:
        worker.kill()


def freeze_worker(cluster: Cluster, chance: Random) -> None:
    """Stopped until others have taken what it had, then it goes on as if nothing had been."""
    worker = chance.choice(cluster.workers)
    worker.freeze()
    time.sleep(cluster.lease_seconds * chance.uniform(1.3, 2.2))
    worker.thaw()


def blink_worker(cluster: Cluster, chance: Random) -> None:
    """Stopped for less than a lease, or about one: perhaps taken over, perhaps not."""
    worker = chance.choice(cluster.workers)
    worker.freeze()
    time.sleep(cluster.lease_seconds * chance.uniform(0.5, 1.1))
    worker.thaw()


def hang_worker(cluster: Cluster, chance: Random) -> None:
    """Stopped for longer than a step may take: its watchdog ends it when it goes on, or it finds that it has
    lost everything.
    """
    worker = chance.choice(cluster.workers)
    worker.excuse()
    worker.freeze()
    time.sleep(cluster.stall_seconds + chance.uniform(1.5, 3.0))
    worker.thaw()


def drain_worker(cluster: Cluster, chance: Random) -> None:
    """SIGTERM: finishes what it can, hands the rest back."""
    chance.choice(cluster.workers).terminate(STOP_SECONDS)


def hurry_worker(cluster: Cluster, chance: Random) -> None:
    """SIGTERM twice: ends at once, still handing back."""
    chance.choice(cluster.workers).terminate(STOP_SECONDS, times=2)


def restart_workers(cluster: Cluster, chance: Random) -> None:
    """A rolling restart: each is drained, and the next only when its successor is well."""
    for worker in cluster.workers:
        worker.terminate(STOP_SECONDS)
        until(worker.is_well, START_SECONDS, pause=0.2)


def fail_receiver(cluster: Cluster, chance: Random) -> None:
    """Who is told of ends answers with errors for a while."""
    cluster.receiver.is_failing = True
    time.sleep(chance.uniform(1.0, 3.0))
    cluster.receiver.is_failing = False


def kill_api(cluster: Cluster, chance: Random) -> None:
    """kill -9, of the process or of its whole group; open streams break."""
    cluster.api.kill(whole_group=chance.random() < 0.5)


def drain_api(cluster: Cluster, chance: Random) -> None:
    cluster.api.terminate(STOP_SECONDS)


def cut_clients(cluster: Cluster, chance: Random) -> None:
    """Every connection that is no subscription breaks, with calls under way on it."""
    with cluster.admin() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def cut_subscribers(cluster: Cluster, chance: Random) -> None:
    with cluster.admin() as client:
        client.client_kill_filter(_type="pubsub", skipme=True)


def restart_redis(cluster: Cluster, chance: Random) -> None:
    """kill -9 of the server; it comes back with what its append-only file has."""
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
    """As after a failover: the server that everybody is connected to only reads."""
    with cluster.admin() as client:
        client.replicaof(*NOBODY)
        try:
            time.sleep(chance.uniform(0.6, 1.5))
        finally:
            client.replicaof("NO", "ONE")


TO_PROCESSES: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (
        kill_worker, kill_all_workers, freeze_worker, blink_worker, hang_worker, drain_worker, hurry_worker,
        restart_workers, kill_api, drain_api, fail_receiver,
    )
}  # fmt: skip
"""Also to the receiver of webhooks, which is a process to the service."""
TO_REDIS: Mapping[str, Fault] = {
    fault.__name__: fault
    for fault in (cut_clients, cut_subscribers, restart_redis, hang_redis, fill_memory, demote_redis)
}
