"""The records of stored files. Each method runs one script."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tokenmill.protocol.batch_records import FileRecord
from tokenmill.protocol.store.replies import named
from tokenmill.protocol.store.scripting import RedisClient, Scripts

Order = Literal["asc", "desc"]
Removal = Literal["removed", "missing", "in_use"]
_REMOVALS: dict[int, Removal] = {1: "removed", 0: "missing", -1: "in_use"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """Which items of a tenant to list: up to `limit` after the id `after`, of one purpose or of any."""

    tenant: str
    after: str = ""
    limit: int = 20
    order: Order = "desc"
    purpose: str = ""


class FileIndex:
    """Files of one Redis database. Every method may raise the client's connection errors, and can then be
    called again with the same arguments.
    """

    def __init__(self, client: RedisClient) -> None:
        # Files have an expiry of their own.
        self._scripts = Scripts(client, retention_seconds=1)

    def put(self, record: FileRecord) -> None:
        """Make a file visible whose content is stored."""
        place = (record.id, record.tenant, record.purpose, f"{record.expires_at:.6f}")
        self._scripts.run("files/put", *place, record.to_json())

    def get(self, file_id: str, tenant: str | None = None) -> FileRecord | None:
        """None if there is no such file, or it is not `tenant`'s."""
        record = _to_record(self._scripts.run("batches/get", "file", file_id))
        return record if record and tenant in (None, record.tenant) else None

    def page(self, query: PageQuery) -> tuple[list[FileRecord], bool]:
        """Files in the order of their creation, and whether more follow."""
        rows, has_more = read_page(self._scripts, "files", query)
        return [record for row in rows if (record := _to_record(row))], has_more

    def remove(self, file_id: str, tenant: str | None = None) -> Removal:
        """Remove the record of a file. Its content is to be deleted afterwards."""
        return _REMOVALS[self._scripts.run("files/remove", file_id, tenant or "")]

    def expired(self, limit: int) -> list[str]:
        """The ids of up to `limit` files that have expired."""
        return [file_id.decode() for file_id in self._scripts.run("files/expired", limit)]


def read_page(scripts: Scripts, kind: str, query: PageQuery) -> tuple[list[Sequence[Any]], bool]:
    """The hashes of a page of `files` or `batches`, and whether more follow."""
    rows: list[Sequence[Any]] = []
    after, wanted = query.after, query.limit + 1
    while len(rows) < wanted:
        count = wanted - len(rows)
        place = (kind, query.tenant, after, count, query.order, query.purpose)
        *items, resume = scripts.run("batches/page", *place)
        rows += items[1::2]
        after = resume.decode()
        if not after:
            break
    return rows[: query.limit], len(rows) > query.limit


def _to_record(flat: Sequence[Any]) -> FileRecord | None:
    fields = named(flat)
    if "record" not in fields:
        return None
    return replace(FileRecord.from_json(fields["record"]), num_uses=int(fields.get("uses", 0)))
