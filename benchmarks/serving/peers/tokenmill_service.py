"""The whole service: `tokenmill serve` with its own Redis on disk, tasks over HTTP, tokens by event streams.

Processor time and memory are those of Redis, worker, API and this client together.
"""

import atexit
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serving.protocol import Clock, Request, Served, Settings, serve

START_SECONDS = 300.0
CALL_SECONDS = 3600.0
STOP_SECONDS = 4.0
HEADERS = {"Content-Type": "application/json"}


class Service:
    def load(self, settings: Settings) -> dict[str, Any]:
        directory = Path(settings.scratch) / "service"
        shutil.rmtree(directory, ignore_errors=True)
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from tokenmill.cli.main import main; main()", "serve"],
            env={**os.environ, **variables(settings, directory)},
            stdin=subprocess.DEVNULL,
        )
        atexit.register(self._stop)
        self._address = self._wait_until_ready(directory / "api-url")
        return {"redis": "append-only, its own"}

    def run(self, requests: list[Request]) -> list[Served]:
        clock = Clock()
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda request: self._serve(request, clock), requests))

    def _serve(self, request: Request, clock: Clock) -> Served:
        """Submit a task, then read its events to the end."""
        clock.wait_until(request.arrival)
        connection = http.client.HTTPConnection(*self._address, timeout=CALL_SECONDS)
        body = {
            "prompt_token_ids": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        connection.request("POST", "/v1/tasks", json.dumps(body), HEADERS)
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != http.client.ACCEPTED:
            raise RuntimeError(f"a task was answered {reply.status}: {text[:300]!r}")
        events = http.client.HTTPConnection(*self._address, timeout=CALL_SECONDS)
        events.request("GET", json.loads(text)["urls"]["events"])
        served = Served([], [])
        for line in events.getresponse():
            if line.startswith(b"data:"):
                event = json.loads(line[len(b"data:") :])
                if event["token"] is not None:
                    served.tokens.append(event["token"])
                    served.times.append(clock.now())
                elif event["error"]:
                    raise RuntimeError(f"a task failed: {event['error']}")
        connection.close()
        events.close()
        return served

    def _wait_until_ready(self, file: Path) -> tuple[str, int]:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the service ended with {self._process.returncode}: see the log")
            if file.exists() and (address := urlsplit(file.read_text().strip())).port:
                place = (str(address.hostname), address.port)
                if is_ready(*place):
                    return place
            time.sleep(0.1)
        raise RuntimeError("the service is not ready: see the log")

    def _stop(self) -> None:
        """The harness ends what has not ended by then."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()


def variables(settings: Settings, directory: Path) -> dict[str, str]:
    return {
        "TOKENMILL_MODEL": settings.model,
        "TOKENMILL_DTYPE": settings.dtype,
        "TOKENMILL_DEVICE": settings.device,
        "TOKENMILL_STATE_DIR": str(directory),
        "TOKENMILL_CACHE_DIR": settings.scratch,
        "TOKENMILL_PORT": "0",
        "TOKENMILL_METRICS_PORT": "0",
        "TOKENMILL_MAX_NUM_BATCHED_TOKENS": str(settings.token_budget),
        "TOKENMILL_MAX_NUM_SEQS": str(settings.max_seqs),
        "TOKENMILL_MAX_MODEL_LEN": str(settings.max_model_len),
        "TOKENMILL_NUM_KV_BLOCKS": str(settings.kv_tokens // 16),
    }


def is_ready(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    serve(Service())
