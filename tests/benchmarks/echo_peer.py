"""An engine for the tests of the harness: it answers at once with the place of a request, or misbehaves."""

import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.serving.protocol import Request, Served, Settings, drive, serve


class Echo:
    def load(self, settings: Settings) -> dict[str, Any]:
        sys.stdout.write("noise, as libraries make it\n")
        sys.stdout.flush()
        self._options = settings.options
        if self._options.get("child"):
            self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        return {"echo": "1"}

    def run(self, requests: list[Request]) -> list[Served]:
        if self._options.get("fails"):
            raise RuntimeError("as requested")
        if self._options.get("dies"):
            os._exit(7)
        if self._options.get("hangs"):
            time.sleep(600)
        if self._options.get("works"):
            end = time.process_time() + 0.1
            while time.process_time() < end:
                pass
        running: list[int] = []

        def step() -> list[tuple[int, int]]:
            return [(place, place) for place in running if len_of[place] > counts[place] and count(place)]

        counts = [0] * len(requests)
        len_of = [request.max_tokens for request in requests]

        def count(place: int) -> bool:
            counts[place] += 1
            return True

        return drive(requests, lambda place, _: running.append(place), step)


if __name__ == "__main__":
    serve(Echo())
