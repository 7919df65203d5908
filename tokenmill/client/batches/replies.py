"""What the service answers about files and batches."""

from collections.abc import Mapping
from typing import Any

from tokenmill.client.replies import Reply

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""The statuses of a batch that has ended."""


class File(Reply):
    """A stored file. `bytes`: its size. `created_at`: seconds since the epoch."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str | None = None
    expires_at: int | None = None


class Deleted(Reply):
    """A file that was deleted."""

    id: str
    deleted: bool


class RequestCounts(Reply):
    """The lines of a batch so far."""

    total: int
    completed: int
    failed: int


class BatchProblem(Reply):
    """Why a batch failed as a whole. `line`: of the input, from 1."""

    code: str | None = None
    message: str | None = None
    line: int | None = None
    param: str | None = None


class BatchProblems(Reply):
    """The list of them."""

    data: tuple[BatchProblem, ...] = ()


class BatchFields(Reply):
    """A batch. `status`: validating, in_progress, finalizing or cancelling, and then one of `ENDED`.

    Times: seconds since the epoch.
    """

    id: str
    object: str = "batch"
    status: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expires_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: RequestCounts | None = None
    errors: BatchProblems | None = None
    metadata: Mapping[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class LineResponse(Reply):
    """The HTTP response to one line."""

    status_code: int
    request_id: str | None = None
    body: Mapping[str, Any]


class LineError(Reply):
    """Why a line has no response."""

    code: str | None = None
    message: str | None = None


class BatchResult(Reply):
    """The result of one line: a response, or an error."""

    id: str | None = None
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def succeeded(self) -> bool:
        return self.error is None and self.response is not None and self.response.status_code < 400

    @property
    def text(self) -> str | None:
        """The text of the first choice. None: there is none, as for an error or a call of a tool."""
        choices = self.response.body.get("choices") if self.response else None
        if not choices:
            return None
        text = choices[0].get("text", (choices[0].get("message") or {}).get("content"))
        return None if text is None else str(text)
