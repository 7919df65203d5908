"""Files and batches: bodies, queries and replies."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from api.schemas.openai.shared import Tolerant

MAX_PAGE = 10_000
MAX_BATCH_PAGE = 100
MIN_EXPIRY_SECONDS, MAX_EXPIRY_SECONDS = 3600, 30 * 86400
MAX_METADATA = 16
MAX_WINDOW_SECONDS = 7 * 86400
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class FilePath(BaseModel):
    """The file."""

    file_id: str = Field(description="The `id` of the file.")


class FilesQuery(BaseModel):
    """Which files, and in which order."""

    purpose: str = Field("", description="Only files of this purpose.")
    after: str = Field("", description="The `id` of the file before the first one.")
    limit: int = Field(MAX_PAGE, ge=1, le=MAX_PAGE, description="How many files at most.")
    order: Literal["asc", "desc"] = Field("desc", description="`desc`: the newest first.")


class FileView(BaseModel):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """The file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class OutputExpiry(Tolerant):
    """When the files of results expire."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)]


class BatchBody(Tolerant):
    """The requests of a file, to be run. Unknown fields are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "input_file_id": "file-0197c2e0a1b30123456789abcdef0123",
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            }
        }
    )

    input_file_id: str = Field(description="A file with the purpose `batch`: a request on each line.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"] = Field(
        description="The route of all requests."
    )
    completion_window: str = Field(
        description="How long the batch may take, such as `24h`: a number of s, m, h or d, at most 7d."
    )
    metadata: dict[str, str] | None = Field(None, description="Returned with the batch.")
    output_expires_after: OutputExpiry | None = Field(None, description="When the results expire.")

    @field_validator("completion_window")
    @classmethod
    def _is_window(cls, window: str) -> str:
        if not _WINDOW.fullmatch(window) or not window_seconds(window) <= MAX_WINDOW_SECONDS:
            raise ValueError("must be a time such as 24h, 90m or 7d, at most 7d")
        return window

    @field_validator("metadata")
    @classmethod
    def _is_small(cls, metadata: dict[str, str] | None) -> dict[str, str] | None:
        if metadata and len(metadata) > MAX_METADATA:
            raise ValueError(f"must have at most {MAX_METADATA} members")
        if metadata and any(len(name) > 64 or len(value) > 512 for name, value in metadata.items()):
            raise ValueError("must have names of at most 64 and values of at most 512 characters")
        return metadata


def window_seconds(window: str) -> int:
    """The seconds of a completion window."""
    match = _WINDOW.fullmatch(window)
    assert match is not None
    return int(match[1]) * _UNIT_SECONDS[match[2]]


class BatchPath(BaseModel):
    """The batch."""

    batch_id: str = Field(description="The `id` of the batch.")


class BatchesQuery(BaseModel):
    """Which batches, the newest first."""

    after: str = Field("", description="The `id` of the batch before the first one.")
    limit: int = Field(20, ge=1, le=MAX_BATCH_PAGE, description="How many batches at most.")


class BatchError(BaseModel):
    """Why a batch failed. `line`: in the input file, from 1."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    """Why a batch failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    """The requests of a batch; those that have not ended are in neither `completed` nor `failed`."""

    total: int
    completed: int
    failed: int


class BatchView(BaseModel):
    """A batch. Times in seconds since the epoch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None = Field(description="The results; null until the batch ends, or without any.")
    error_file_id: str | None = Field(description="The same for the requests that failed.")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchView]
    first_id: str | None
    last_id: str | None
    has_more: bool
