"""Runs a batch of many requests on the whole service and kills each process on the way.

    python -m benchmarks.batches --lines 50000 --kills 2

The model is a tiny one with random weights and each request generates one token, so the time is that of the
batch, not of the model. Reports lines per second, the largest memory of Redis, and checks that each request
has exactly one result.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import redis

from tests.conftest import RedisServer, free_port, start_redis
from tests.live_service import LiveService
from tests.tiny_models import save_model

ENDPOINT = "/v1/completions"
POLL_SECONDS = 0.5
ENDED = ("completed", "failed", "expired", "cancelled")


class Run:
    """One batch. `victims`: what is killed, one after the other, at equal shares of the lines."""

    def __init__(self, directory: Path, num_lines: int, num_kills: int) -> None:
        self._directory = directory
        self._num_lines = num_lines
        self._victims = ["api", "worker", "redis"] * num_kills
        self._redis: RedisServer = start_redis(directory, free_port())
        self.most_memory = 0
        settings = {
            "TOKENMILL_DTYPE": "float32",
            "TOKENMILL_LEASE_SECONDS": "2",
            "TOKENMILL_FILES_URL": str(directory / "files"),
        }
        self._service = LiveService(save_model(directory / "model"), directory, settings, self._redis.url)

    def run(self) -> dict[str, Any]:
        try:
            with self._service:
                return self._batch()
        finally:
            self._redis.process.kill()
            self._redis.process.wait()

    def _batch(self) -> dict[str, Any]:
        started = time.monotonic()
        file_id = self._upload()
        uploaded = time.monotonic()
        body = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "24h"}
        batch_id = self._service.call("POST", "/v1/batches", body).json["id"]
        batch = self._follow(batch_id)
        seconds = time.monotonic() - uploaded
        self._check(batch)
        return {
            "lines": self._num_lines,
            "status": batch["status"],
            "upload_seconds": round(uploaded - started, 1),
            "seconds": round(seconds, 1),
            "lines_per_second": round(self._num_lines / seconds, 1),
            "redis_megabytes_at_most": round(self.most_memory / 2**20, 1),
        }

    def _upload(self) -> str:
        path = self._directory / "in.jsonl"
        with path.open("w") as file:
            for number in range(self._num_lines):
                body = {"prompt": f"request {number}", "max_tokens": 1}
                row = {"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body}
                file.write(json.dumps(row) + "\n")
        with path.open("rb") as file:
            url = f"{self._service.api_url}/v1/files"
            reply = httpx.post(url, files={"file": file}, data={"purpose": "batch"}, timeout=300)
        if reply.status_code != 200:
            raise SystemExit(f"the upload was refused: {reply.text}")
        return str(reply.json()["id"])

    def _follow(self, batch_id: str) -> Any:
        """Poll until the end, and kill a process at each share of the lines."""
        num_killed, share = 0, self._num_lines // (len(self._victims) + 1)
        while True:
            batch = self._poll(batch_id)
            if batch and batch["status"] in ENDED:
                return batch
            done = batch["request_counts"]["completed"] if batch else 0
            if num_killed < len(self._victims) and done >= share * (num_killed + 1):
                self._kill(self._victims[num_killed])
                num_killed += 1
            time.sleep(POLL_SECONDS)

    def _poll(self, batch_id: str) -> Any:
        try:
            with redis.Redis.from_url(self._redis.url) as client:
                self.most_memory = max(self.most_memory, client.info("memory")["used_memory"])
            reply = self._service.call("GET", f"/v1/batches/{batch_id}")
        except (OSError, redis.RedisError):
            return None
        return reply.json if reply.status == 200 else None

    def _kill(self, victim: str) -> None:
        print(f"kill -9 {victim}", file=sys.stderr, flush=True)
        if victim == "api":
            self._service.restart_api()
        elif victim == "worker":
            self._service.kill_worker()
            self._service.start_worker(wait=False)
        else:
            self._redis.process.kill()
            self._redis.process.wait()
            self._redis = start_redis(self._directory, self._redis.port)

    def _check(self, batch: Any) -> None:
        """Raises SystemExit unless each request has exactly one result."""
        counts: Counter[str] = Counter()
        for name in filter(None, (batch["output_file_id"], batch["error_file_id"])):
            content = self._service.call("GET", f"/v1/files/{name}/content").body
            counts.update(json.loads(row)["custom_id"] for row in content.splitlines())
        expected = {str(number) for number in range(self._num_lines)}
        if counts != dict.fromkeys(expected, 1):
            doubled = sum(count > 1 for count in counts.values())
            raise SystemExit(f"{len(expected - counts.keys())} requests lost, {doubled} doubled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--kills", type=int, default=1, help="how often each process is killed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-batches-") as directory:
        print(json.dumps(Run(Path(directory), arguments.lines, arguments.kills).run(), indent=1))


if __name__ == "__main__":
    main()
