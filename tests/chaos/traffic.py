"""Concurrent clients, each of which runs one request after another."""

import threading
import time
from collections.abc import Callable, Iterator

from tests.chaos.calls import Caller
from tests.chaos.client import Client, Record
from tests.chaos.workload import Request


class Traffic:
    """`num_clients` clients share `requests`. `records`: one for each request that was started."""

    def __init__(
        self,
        requests: Iterator[Request],
        num_clients: int,
        *,
        api_port: int,
        redis_url: str,
        webhook_url: str,
        on_accepted: Callable[[str], None],
    ) -> None:
        self.records: list[Record] = []
        self._requests = requests
        self._api_port = api_port
        self._redis_url = redis_url
        self._webhook_url = webhook_url
        self._on_accepted = on_accepted
        self._lock = threading.Lock()
        self._enough = threading.Event()
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, name=f"client-{number}", daemon=True)
            for number in range(num_clients)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def enough(self) -> None:
        """Start no more requests."""
        self._enough.set()

    def stop(self, seconds: float) -> None:
        """Wait up to `seconds` for the started requests. Their clients then give up."""
        self.enough()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._over.set()
        for thread in self._threads:
            # A client of a stream that never sends anything does not notice `over`.
            thread.join(max(0.0, deadline + 5 - time.monotonic()))

    def _run(self) -> None:
        while not self._enough.is_set():
            with self._lock:
                record = Record(next(self._requests))
                self.records.append(record)
            caller = Caller(self._api_port, self._over, record.complaints.append)
            Client(record, caller, self._redis_url, self._webhook_url, self._on_accepted).run()
