"""The results of a batch that are not recorded yet, and their files."""

import secrets
import time
from collections.abc import Callable, Iterator

from api.batches.line_calls import LineResult
from api.file_storage import CHUNK_BYTES, FileStorage
from tokenmill.protocol.batch_records import Segment
from tokenmill.protocol.store.batch_store import Progress

MAX_BYTES = 4 * 1024 * 1024
MAX_RESULTS = 500
FIRST_SECONDS = 1.0
MAX_SECONDS = 60.0
"""Results are recorded after these limits. The time grows with the number of segments, so that a batch that
takes a day has few."""
SEGMENTS_PER_SECOND = 20


class ResultBuffer:
    """Collects results and writes them as segments. `num_segments`: how many the batch has already."""

    def __init__(self, storage: FileStorage, batch_id: str, num_segments: int) -> None:
        self._storage = storage
        self._batch_id = batch_id
        self._num_segments = num_segments
        self._results: list[LineResult] = []
        self._num_bytes = 0
        self._since = 0.0

    def __contains__(self, number: int) -> bool:
        return any(result.number == number for result in self._results)

    @property
    def numbers(self) -> list[int]:
        return [result.number for result in self._results]

    @property
    def is_due(self) -> bool:
        """Whether the results should be recorded now."""
        if not self._results:
            return False
        if self._num_bytes >= MAX_BYTES or len(self._results) >= MAX_RESULTS:
            return True
        patience = min(MAX_SECONDS, FIRST_SECONDS + self._num_segments / SEGMENTS_PER_SECOND)
        return time.monotonic() - self._since >= patience

    @property
    def is_empty(self) -> bool:
        return not self._results

    def add(self, result: LineResult) -> None:
        if not self._results:
            self._since = time.monotonic()
        self._results.append(result)
        self._num_bytes += len(result.data)

    def store(self) -> Progress:
        """Write the results as segments, which do not count before the returned progress is recorded."""
        outputs = [result.data for result in self._results if not result.is_error]
        errors = [result.data for result in self._results if result.is_error]
        return Progress(
            segments=[
                self._write(kind, rows) for kind, rows in (("output", outputs), ("error", errors)) if rows
            ],
            lines=self.numbers,
            completed=len(outputs),
            failed=len(errors),
        )

    def clear(self) -> list[str]:
        """Forget the results, which are recorded. Returns the ids of their tasks."""
        task_ids = [task_id for result in self._results for task_id in result.task_ids]
        self._num_segments += len({result.is_error for result in self._results})
        self._results, self._num_bytes = [], 0
        return task_ids

    def _write(self, kind: str, rows: list[bytes]) -> Segment:
        name = f"{self._batch_id}.{kind}.{secrets.token_hex(8)}"
        with self._storage.create(name) as file:
            for row in rows:
                file.write(row)
            file.commit()
        return Segment(kind=kind, name=name, size=file.size)


def join(storage: FileStorage, segments: list[Segment], name: str, renew: Callable[[], None]) -> int:
    """Write the segments one after the other as one file, and return its size. Calls `renew` after each."""
    with storage.create(name) as file:
        for segment in segments:
            for chunk in chunks(storage, segment.name):
                file.write(chunk)
            renew()
        file.commit()
    return file.size


def chunks(storage: FileStorage, name: str) -> Iterator[bytes]:
    """The content of a file in pieces. Raises `FileNotFoundError`."""
    with storage.open(name) as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
