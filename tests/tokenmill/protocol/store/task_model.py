"""A model in plain Python of all tasks of a service: the expected state of each, including the crashes that
count against it; and what workers believe of the tasks that they claimed.
"""

from collections import Counter
from dataclasses import dataclass, field

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.fair_model import FairModel, Waiting
from tests.tokenmill.protocol.store.tasks import SLUG
from tokenmill.protocol.messages import LogEntry
from tokenmill.protocol.naming import queue_name
from tokenmill.protocol.records import Accepted, Cancelled, Claimed, Lost, TaskPhase, Write
from tokenmill.protocol.store.task_store import TaskStore


@dataclass
class Expected:
    """What the model knows of a task."""

    waiting: Waiting
    num_tokens: int = 0
    owner: str | None = None
    lapsed: bool = False
    reason: str | None = None
    ended_by: str | None = None
    cancelled_under: str | None = None
    claimed_at: int = 0
    phase: TaskPhase = "untouched"
    crashes: list[tuple[str, TaskPhase]] = field(default_factory=list)

    @property
    def is_suspect(self) -> bool:
        num_crashes = Counter(phase for _, phase in self.crashes)
        return bool(num_crashes["seated"] or num_crashes["alone"] or num_crashes["waiting"] >= 3)

    def grow(self, num_tokens: int) -> None:
        if num_tokens > self.num_tokens:
            self.num_tokens, self.crashes = num_tokens, []

    def die(self) -> bool:
        """Record that its worker crashed. Returns whether the task is poisoned; then it ends."""
        assert self.owner is not None
        if self.phase != "untouched" and self.num_tokens == self.claimed_at:
            self.crashes.append((self.owner, self.phase))
        if is_poison := sum(phase == "alone" for _, phase in self.crashes) >= 3:
            self.reason = "error"
        return is_poison

    def absolve(self, owner: str) -> None:
        if self.reason is None:
            self.crashes = [crash for crash in self.crashes if crash[0] != owner]

    @property
    def queue(self) -> str:
        return queue_name(SLUG, self.waiting.priority, self.waiting.tenant)

    @property
    def cost(self) -> int:
        return self.waiting.cost


@dataclass
class Holder:
    """What a worker believes of a task. It may be wrong, and must learn so."""

    claimed: Claimed
    sent: int = 0
    lost: bool = field(default=False)


class World:
    """The store under test, and its model."""

    def __init__(self, client: RedisClient) -> None:
        self.client = client
        self.store = TaskStore(client)
        self.tasks: dict[str, Expected] = {}
        self.holders: list[Holder] = []
        self.fair = FairModel()
        self.records: dict[tuple[str, str], tuple[str, str]] = {}

    def limit_met(self, cost: int, max_tasks: int | None, max_tokens: int | None) -> str | None:
        num_tasks = len(self.fair.waiting)
        if max_tasks is not None and num_tasks >= max_tasks:
            return "tasks"
        tokens = sum(task.cost for task in self.fair.waiting.values())
        return "tokens" if max_tokens is not None and num_tasks and tokens + cost > max_tokens else None

    def dies(self, task_id: str) -> bool:
        """Record that its worker crashed. Returns whether the task is poisoned and has ended."""
        task = self.tasks[task_id]
        if is_poison := task.die():
            self.let_go(task, num_served=task.num_tokens)
            task.owner = None
        return is_poison

    def put_back(self, task_id: str) -> None:
        task = self.tasks[task_id]
        self.let_go(task, num_served=0)
        self.fair.enter(task_id, task.waiting)
        task.owner = None

    def let_go(self, task: Expected, num_served: int) -> None:
        self.fair.charge(task.waiting.tenant, num_served - task.cost)

    def waiting(self) -> set[str]:
        return {name for name, task in self.tasks.items() if task.reason is None and task.owner is None}

    def owns(self, holder: Holder) -> bool:
        return self.tasks[holder.claimed.task_id].owner == holder.claimed.owner

    def write(self, holder: Holder, first: int, entries: tuple[LogEntry, ...]) -> Write:
        claimed = holder.claimed
        return Write(task_id=claimed.task_id, owner=claimed.owner, first_seq=first, entries=entries)

    def check(self, holder: Holder, outcome: object) -> None:
        """The owner is never refused; another worker is, unless it repeats its own settlement."""
        if self.owns(holder):
            assert outcome == Accepted()
        elif self.tasks[holder.claimed.task_id].ended_by != holder.claimed.owner:
            assert outcome == self.refusal(holder)

    def learn(self, holder: Holder, outcome: object) -> None:
        """A worker that is refused has called, so it has not crashed."""
        if outcome == Lost():
            self.tasks[holder.claimed.task_id].absolve(holder.claimed.owner)

    def refusal(self, holder: Holder) -> Lost | Cancelled:
        """The outcome for a worker that does not own the task."""
        owner = self.tasks[holder.claimed.task_id].cancelled_under
        return Cancelled() if owner == holder.claimed.owner else Lost()
