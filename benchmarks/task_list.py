"""The cost of listing tasks: `python -m benchmarks.task_list [--tasks 100000]`.

Starts a Redis of its own with an append-only file, submits tasks through the store and ends all but the last
thousand. Prints milliseconds per page (median, 99 %) for the first page, a page in the middle and one with a
filter that no task fits, and the bytes of the list for each task. A page looks at 200 tasks.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis

from benchmarks.serving.machine import machine_facts
from tests.conftest import free_port, start_redis
from tests.tokenmill.protocol.store.tasks import submission
from tokenmill.protocol import keys
from tokenmill.protocol.snapshots import ListCursor
from tokenmill.protocol.store.task_store import TaskStore

WAITING = 1000
REPEATS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = start_redis(Path(directory), free_port())
        try:
            with redis.Redis.from_url(server.url) as client:
                measure(client, arguments.tasks)
        finally:
            server.process.kill()
            server.process.wait()


def measure(client: "redis.Redis", num_tasks: int) -> None:
    store = TaskStore(client, retention_seconds=86400)
    print(machine_facts(Path(__file__).parents[1])["cpu"])
    for number in range(num_tasks):
        task_id = store.submit(submission(client)).task_id
        if number < num_tasks - WAITING:
            store.cancel(task_id)
    index = keys.tasks("default")
    size: Any = client.memory_usage(index, samples=0)
    print(f"{client.zcard(index)} tasks; {size / num_tasks:.0f} bytes each")
    pages: dict[str, Callable[[], object]] = {
        "first page": lambda: store.list_tasks("default"),
        "page in the middle": lambda: store.list_tasks("default", after=middle(client, index)),
        "status=failed": lambda: store.list_tasks("default", status="failed"),
    }
    for name, read in pages.items():
        taken = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            read()
            taken.append((time.perf_counter() - started) * 1e3)
        print(
            f"{name}: {statistics.median(taken):.2f} ms, 99 % {statistics.quantiles(taken, n=100)[98]:.2f} ms"
        )


def middle(client: "redis.Redis", index: str) -> ListCursor:
    half = client.zcard(index) // 2
    found: Any = client.zrange(index, half, half, withscores=True)
    ((task_id, accepted_us),) = found
    return ListCursor(f"{accepted_us:.0f}", task_id.decode())


if __name__ == "__main__":
    main()
