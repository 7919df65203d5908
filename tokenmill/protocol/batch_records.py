"""Files and batches as Redis holds them. Times are seconds since the epoch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
"""The statuses of a batch that has ended."""


class _Record:
    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)  # type: ignore[call-overload]  # a dataclass

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Members that a newer version has added are left out."""
        known = {one.name for one in fields(cls)}  # type: ignore[arg-type]  # a dataclass
        return cls(**{name: value for name, value in json.loads(text).items() if name in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord(_Record):
    """A stored file. `tenant`: its hash. `size`: bytes."""

    id: str
    tenant: str
    purpose: str
    filename: str
    size: int
    created_at: float
    expires_at: float
    num_uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest(_Record):
    """A batch as it was created. `tenant`: the hash of `tenant_name`. `output_seconds`: how long its results
    are kept.
    """

    id: str
    tenant: str
    tenant_name: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: float
    expires_at: float
    output_seconds: float
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch and its progress. `times`: by the name of the member, such as `failed_at`.

    `reach`: lines below this number may have been submitted. `outcome`: the status with which it will end,
    once that is known. `errors`: why it failed.
    """

    request: BatchRequest
    status: str
    total: int = 0
    completed: int = 0
    failed: int = 0
    reach: int = 0
    times: Mapping[str, float] = field(default_factory=dict)
    outcome: str | None = None
    errors: tuple[Mapping[str, Any], ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment(_Record):
    """A stored piece of the results of a batch. `kind`: `output` or `error`. `size`: bytes."""

    kind: str
    name: str
    size: int
