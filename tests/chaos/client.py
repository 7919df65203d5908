"""A client with one request: submits, reads, perhaps cancels, and records what it received.

It checks nothing. The ledger compares the records with what is stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.calls import Caller, RunOver
from tests.chaos.readers import READ, TERMINAL, Reading, disconnect
from tests.chaos.workload import Request
from tokenmill.client.streams import UnknownTask


@dataclass
class Record:
    """A request as its client saw it.

    `task_ids`: one for each accepted submission. `complaints`: unexpected replies.
    """

    request: Request
    task_ids: list[str] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)
    complaints: list[str] = field(default_factory=list)
    timed_out: bool = False

    @property
    def expects_webhook(self) -> bool:
        return self.request.has_webhook and bool(self.task_ids)


class Client:
    """`on_accepted` receives the task's id. `url`: Redis, for readers of its channels. `webhook_url`: the
    receiver of webhooks.
    """

    def __init__(
        self,
        record: Record,
        caller: Caller,
        url: str,
        webhook_url: str,
        on_accepted: Callable[[str], None],
    ) -> None:
        self._record = record
        self._request = record.request
        self._caller = caller
        self._url = url
        webhook = {"webhook": {"url": webhook_url}} if record.request.has_webhook else {}
        self._body = {**record.request.body, **webhook}
        self._on_accepted = on_accepted
        self._has_cancelled = False

    def run(self) -> None:
        record = self._record
        try:
            self._submit()
            self._on_accepted(record.task_ids[0])
            if self._request.resubmits:
                self._submit()
            self._cancel_at(0)
            self._read()
            if self._request.resubmits:
                self._submit()
        except RunOver:
            record.timed_out = True
        except UnknownTask:
            record.complaints.append("the task is unknown to the service")

    def _read(self) -> None:
        task_id, reading = self._record.task_ids[0], self._record.reading
        if self._request.disconnect_at is not None:
            disconnect(self._caller, task_id, reading, self._request.disconnect_at)
        else:
            READ[self._request.reader](self._caller, self._url, task_id, reading, self._cancel_at)

    def _submit(self) -> None:
        key = self._request.key
        answer = self._caller.call(
            "POST",
            "/v1/tasks",
            self._body,
            headers={"Idempotency-Key": key} if key else {},
            expected=(202,),
        )
        self._record.task_ids.append(answer.body["id"])

    def _cancel_at(self, num_received: int) -> None:
        at = self._request.cancel_at
        if at is None or num_received < at or self._has_cancelled:
            return
        self._has_cancelled = True
        # Twice: the second call must change nothing. Not DELETE, which erases a task that has ended.
        path = f"/v1/tasks/{self._record.task_ids[0]}/cancel"
        for _ in range(2):
            status = self._caller.call("POST", path).body["status"]
            self._record.reading.statuses.append(status)
            if status not in TERMINAL:
                self._record.complaints.append(f"after its cancel the task was {status}")
