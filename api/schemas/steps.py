"""The path, the query and the headers of the routes of a worker's steps."""

from pydantic import BaseModel, Field

from api.schemas.requests import Parameters
from tokenmill.protocol.steps import MAX_ENTRIES

DEFAULT_LAST = 200
_ENTRY_ID = r"^[0-9]{1,18}-[0-9]{1,18}$"


class WorkerPath(BaseModel):
    """The worker."""

    name: str = Field(max_length=256, description="The `name` of the worker.")


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
