"""One client and its one request: submits, reads, perhaps cancels, and writes down what it was told.

Law: it judges nothing. The ledger does, from what is written here and what is stored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.calls import Caller, GaveUp
from tests.chaos.errands import Errand
from tests.chaos.readers import READ, TERMINAL, Reading, leave
from tokenmill.client.streams import UnknownTask


@dataclass
class Record:
    """What became of one errand, as its client saw it.

    `task_ids`: one for each time that the submission was accepted. `complaints`: what should not have been
    answered.
    """

    errand: Errand
    task_ids: list[str] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)
    complaints: list[str] = field(default_factory=list)
    gave_up: bool = False

    @property
    def is_to_be_told(self) -> bool:
        """By webhook, of the end."""
        return self.errand.has_webhook and bool(self.task_ids)


class Client:
    """`on_accepted` is told the task's id; `url`: where Redis is, for those who read its channels;
    `webhook_url`: who is told of the end of an errand with a webhook.
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
        self._errand = record.errand
        self._caller = caller
        self._url = url
        webhook = {"webhook": {"url": webhook_url}} if record.errand.has_webhook else {}
        self._body = {**record.errand.body, **webhook}
        self._on_accepted = on_accepted
        self._has_cancelled = False

    def run(self) -> None:
        record = self._record
        try:
            self._submit()
            self._on_accepted(record.task_ids[0])
            if self._errand.resubmits:
                self._submit()
            self._cancel_at(0)
            self._read()
            if self._errand.resubmits:
                self._submit()
        except GaveUp:
            record.gave_up = True
        except UnknownTask:
            record.complaints.append("the task was forgotten")

    def _read(self) -> None:
        task_id, reading, leave_at = self._record.task_ids[0], self._record.reading, self._errand.leave_at
        if leave_at is not None:
            leave(self._caller, task_id, reading, leave_at)
        else:
            READ[self._errand.reader](self._caller, self._url, task_id, reading, self._cancel_at)

    def _submit(self) -> None:
        key = self._errand.key
        answer = self._caller.call(
            "POST",
            "/v1/tasks",
            self._body,
            headers={"Idempotency-Key": key} if key else {},
            expected=(202,),
        )
        self._record.task_ids.append(answer.body["id"])

    def _cancel_at(self, num_received: int) -> None:
        at = self._errand.cancel_at
        if at is None or num_received < at or self._has_cancelled:
            return
        self._has_cancelled = True
        # Twice, by both ways: the second must change nothing.
        path = f"/v1/tasks/{self._record.task_ids[0]}"
        for method, ending in (("POST", "/cancel"), ("DELETE", "")):
            status = self._caller.call(method, path + ending).body["status"]
            self._record.reading.told.append(status)
            if status not in TERMINAL:
                self._record.complaints.append(f"after its cancel the task was {status}")
