"""The parts of the application that the routes of tasks use."""

from dataclasses import dataclass

from api.shutdown import Shutdown
from api.streams.step_feeds import StepFeeds
from api.streams.task_events import TaskEventReader
from api.submission import Submitter
from api.tenant_slots import TenantSlots
from api.tool_calls.formats import DEFAULT_FORMAT
from monitoring.http import HttpMetrics
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

REPLY_SLOTS = 4
REPLY_WAIT_SECONDS = 30.0
"""Longer than building any reply takes, also one that fails because Redis does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskServices:
    """`stream_slots`: calls that follow or wait; the remaining threads are kept for short calls.

    `reply_slots`: threads that build replies. Building the reply of a long log keeps the interpreter busy and
    delays every other thread, the one that reads requests among them, so only a few may do it at once.
    """

    settings: ApiSettings
    store: TaskStore
    readers: Readers
    submitter: Submitter
    event_reader: TaskEventReader
    step_feeds: StepFeeds
    stream_slots: TenantSlots
    reply_slots: TenantSlots
    metrics: HttpMetrics
    shutdown: Shutdown

    def tool_format(self) -> str:
        """How the served model writes tool calls. Known once a worker has loaded it, so before any output."""
        card = self.store.model_card(self.settings.slug)
        return card.tool_format if card else DEFAULT_FORMAT
