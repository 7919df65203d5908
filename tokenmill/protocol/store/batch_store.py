"""The batches in Redis. Each method runs one script, so each change happens at once or not at all.

Invariants: one runner at a time owns a batch, for as long as it renews its lease. What another runner reports
is not stored. A line is marked as done in the same change that records the segment with its result.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from tokenmill.protocol import keys
from tokenmill.protocol.batch_records import Batch, BatchRequest, Segment
from tokenmill.protocol.store.file_index import PageQuery, read_page
from tokenmill.protocol.store.replies import named
from tokenmill.protocol.store.scripting import RedisClient, Scripts

LEASE_SECONDS = 15.0
MAX_OPEN_BATCHES = 200
"""Batches of one tenant that have not ended."""
_NUMBERS = ("total", "completed", "failed", "reach")
_TEXTS = ("outcome", "output_file_id", "error_file_id")

Created = Literal["created", "no_file", "full"]


class BatchLost(Exception):
    """Another runner owns the batch: its lease had lapsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a runner adds. `lines`: numbers of the lines whose results are in `segments`."""

    fields: Mapping[str, str | float | int] = field(default_factory=dict)
    segments: Sequence[Segment] = ()
    lines: Sequence[int] = ()
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Updated:
    """`is_cancelled`: the batch is to be cancelled. `num_waiting`: batches that wait for a runner."""

    is_cancelled: bool
    num_waiting: int


class BatchStore:
    """Batches of one Redis database. Every method may raise the client's connection errors."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        # Batches have an expiry of their own.
        self._scripts = Scripts(client, retention_seconds=1)

    def create(self, request: BatchRequest) -> Created:
        """Store a batch. `no_file`: its input is missing; `full`: the tenant has too many open batches."""
        place = (request.id, request.tenant, request.input_file_id, MAX_OPEN_BATCHES)
        outcome: Created = self._scripts.run("batches/create", *place, request.to_json()).decode()
        return outcome

    def get(self, batch_id: str, tenant: str | None = None) -> Batch | None:
        """None if there is no such batch, or it is not `tenant`'s."""
        batch = _to_batch(self._scripts.run("batches/get", "batch", batch_id))
        return batch if batch and tenant in (None, batch.request.tenant) else None

    def page(self, query: PageQuery) -> tuple[list[Batch], bool]:
        """Batches in the order of their creation, and whether more follow."""
        rows, has_more = read_page(self._scripts, "batches", query)
        return [batch for row in rows if (batch := _to_batch(row))], has_more

    def cancel(self, batch_id: str) -> Batch | None:
        """Request the end of a batch. Without effect if it has ended."""
        return _to_batch(self._scripts.run("batches/cancel", batch_id))

    def take(self, owner: str) -> Batch | None:
        """Take the next batch that waits for a runner. `owner`: a random id of this attempt."""
        reply = self._scripts.run("batches/take", owner, LEASE_SECONDS)
        return None if reply is None else _to_batch(reply[1])

    def update(self, batch_id: str, owner: str, progress: Progress) -> Updated:
        """Add `progress` and renew the lease. Raises `BatchLost`. Must not be repeated after an error."""
        parts = (
            batch_id,
            owner,
            LEASE_SECONDS,
            progress.completed,
            progress.failed,
            len(progress.fields),
            *chain.from_iterable(progress.fields.items()),
            len(progress.segments),
            *(segment.to_json() for segment in progress.segments),
            *progress.lines,
        )
        reply = self._scripts.run("batches/update", *parts)
        if reply is None:
            raise BatchLost
        return Updated(bool(reply[0]), int(reply[1]))

    def release(self, batch_id: str, owner: str, seconds: float = 0.0) -> None:
        """Return a batch. It may be taken again after `seconds`."""
        self._scripts.run("batches/release", batch_id, owner, seconds)

    def finish(self, batch_id: str, owner: str, kept_seconds: float, fields: Mapping[str, Any]) -> None:
        """End a batch, which is kept for `kept_seconds`. Raises `BatchLost`."""
        values = chain.from_iterable(fields.items())
        if not self._scripts.run("batches/finish", batch_id, owner, kept_seconds, *values):
            raise BatchLost

    def done_lines(self, batch_id: str) -> bytes:
        """One bit for each line, the first line in the highest bit of the first byte."""
        return bytes(self._client.get(keys.batch_lines(batch_id)) or b"")

    def segments(self, batch_id: str) -> list[Segment]:
        return [Segment.from_json(text) for text in self._scripts.run("batches/get", "segments", batch_id)]

    def ends(self, task_ids: Sequence[str]) -> list[str]:
        """For each task its final status, "" while it has none, or `lost` if there is no such task."""
        return [end.decode() for end in self._scripts.run("batches/ends", *task_ids)] if task_ids else []


def is_done(lines: bytes, number: int) -> bool:
    """Whether the bit of a line is set."""
    byte = number >> 3
    return byte < len(lines) and bool(lines[byte] & (0x80 >> (number & 7)))


def _to_batch(flat: Sequence[Any]) -> Batch | None:
    fields = {name: value.decode() for name, value in named(flat).items()}
    if "record" not in fields:
        return None
    numbers: dict[str, Any] = {name: int(fields.get(name, 0)) for name in _NUMBERS}
    texts: dict[str, Any] = {name: fields.get(name) or None for name in _TEXTS}
    return Batch(
        request=BatchRequest.from_json(fields["record"]),
        status=fields["status"],
        times={name: float(value) for name, value in fields.items() if name.endswith("_at")},
        errors=tuple(json.loads(fields.get("errors", "[]"))),
        **numbers,
        **texts,
    )
