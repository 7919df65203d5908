"""What finished tasks leave in Redis: keys and bytes before them, at the peak, and after they have expired.

Without a model: tasks of several tenants and priorities are ended through the store alone, in every possible
way, on a separate server. Writes `benchmarks/results/retention.json`.

    python -m benchmarks.retention [NUM_TASKS [RETENTION_SECONDS]]
"""

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import redis

from benchmarks.durability import redis_server
from tests.tokenmill.protocol.store.finished_work import finish_many
from tests.tokenmill.protocol.store.tasks import SLUG
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore

RESULTS = Path(__file__).parent / "results" / "retention.json"
LONGEST_WAIT_SECONDS = 600.0


def size(client: "redis.Redis") -> dict[str, int]:
    return {"keys": client.dbsize(), "bytes": int(client.info("memory")["used_memory"])}


def measure(client: "redis.Redis", num_tasks: int, retention_seconds: float) -> dict[str, Any]:
    # The cost of the disk is not measured here.
    client.config_set("appendfsync", "no")
    base = most = size(client)
    for num_ended in finish_many(client, num_tasks, retention_seconds):
        if num_ended % 1000 == 0:
            most = max(most, size(client), key=lambda one: one["bytes"])
    # The tokens served to each tenant are kept for an hour, for at most ten thousand tenants.
    client.delete(keys.away(SLUG))
    store = TaskStore(client, retention_seconds=retention_seconds)
    longest_reap, deadline = 0.0, time.monotonic() + retention_seconds + LONGEST_WAIT_SECONDS
    while (left := size(client))["keys"] > base["keys"] + 10 and time.monotonic() < deadline:
        began = time.perf_counter()
        store.reap(SLUG, max_task_seconds=3600)
        longest_reap = max(longest_reap, time.perf_counter() - began)
        time.sleep(0.1)
    return {
        "tasks": num_tasks,
        "retention_seconds": retention_seconds,
        "before": base,
        "most": most,
        "after": left,
        "longest_reap_ms": round(longest_reap * 1000, 2),
    }


def main() -> None:
    num_tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    retention_seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 20.0
    with redis_server() as url, redis.Redis.from_url(url, socket_timeout=60) as client:
        result = measure(client, num_tasks, retention_seconds)
    RESULTS.write_text(json.dumps({"machine": platform.platform(), **result}, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
