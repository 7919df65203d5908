"""The path, the query and the headers of the routes of a worker's steps."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from api.schemas.requests import Parameters
from tokenmill.protocol.steps import MAX_ENTRIES

DEFAULT_LAST = 200
_ENTRY_ID = r"^[0-9]{1,18}-[0-9]{1,18}$"


class WorkerPath(BaseModel):
    """The worker."""

    name: str = Field(max_length=256, description="The `name` of the worker.")


class Trace(BaseModel):
    """Steps in the Trace Event Format."""

    traceEvents: list[dict[str, Any]] = Field(description="Slices, counters and names of threads.")  # noqa: N815 - the format's name
    displayTimeUnit: Literal["ms"]  # noqa: N815 - the format's name


class StepBudget(BaseModel):
    """What a step may compute, and what it did."""

    tokens: int
    used: int
    seqs: int
    max_seqs: int


class StepBlocks(BaseModel):
    """Blocks of the KV cache."""

    used: int
    total: int


class Lane(BaseModel):
    """One sequence in a step."""

    task: str | None = Field(description="Null for the task of another tenant.")
    index: int
    state: str = Field(description="`waiting`, `prefill`, `decode` or `preempted`.")
    tokens: int
    reason: str | None = Field(description="Why it waits.")


class StepEventView(BaseModel):
    """One step of a worker's engine. Event `step`."""

    step: int
    at: float = Field(description="Seconds since the epoch.")
    budget: StepBudget
    kv: StepBlocks
    seconds: dict[str, float]
    lanes: list[Lane]


class StepsQuery(Parameters):
    """Where a stream of steps starts."""

    after: str | None = Field(
        None, pattern=_ENTRY_ID, description="Start after the event with this `id`. Overrides `last`."
    )
    last: int = Field(
        DEFAULT_LAST, ge=0, le=MAX_ENTRIES, description="The number of recorded steps to begin with."
    )


class StepsHeaders(Parameters):
    """What a reconnecting EventSource sends."""

    last_event_id: str | None = Field(
        None,
        alias="Last-Event-ID",
        pattern=_ENTRY_ID,
        description="The `id` of the last event received. Overrides `after`.",
    )
