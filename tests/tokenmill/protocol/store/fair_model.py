"""The order of claims in plain Python, without indexes or running counters. It specifies the scripts while no
task has waited for half a minute.
"""

from collections import Counter
from dataclasses import dataclass, field

from tokenmill.protocol.naming import tenant_hash


@dataclass(frozen=True)
class Waiting:
    """A waiting task. `accepted`: its index in the order of acceptance."""

    priority: int
    tenant: str
    cost: int
    accepted: int


@dataclass
class FairModel:
    """`waiting`: by task id. `counters`: of tenants with waiting tasks, and of those that are remembered."""

    waiting: dict[str, Waiting] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    last_counter: int = 0

    def enter(self, task_id: str, task: Waiting) -> None:
        tenants = self.tenants()
        if task.tenant not in tenants:
            minimum = self.minimum_counter()
            own = max(minimum, self.counters.get(task.tenant, 0))
            for tenant in [name for name in self.counters if name not in tenants]:
                if self.counters[tenant] <= minimum:
                    del self.counters[tenant]
            self.counters[task.tenant] = own
        self.waiting[task_id] = task

    def leave(self, task_id: str) -> Waiting:
        task = self.waiting.pop(task_id)
        if task.tenant not in self.tenants():
            self.last_counter = self.counters[task.tenant]
        return task

    def claim(self, max_tasks: int) -> list[str]:
        """The ids in the order in which they are claimed."""
        claimed = []
        for _ in range(min(max_tasks, len(self.waiting))):
            # One tenant has equal counters.
            first = min(self.waiting, key=self._turn)
            task = self.leave(first)
            self.charge(task.tenant, task.cost)
            claimed.append(first)
        return claimed

    def charge(self, tenant: str, num_tokens: int) -> None:
        self.counters[tenant] = max(0, self.counters.get(tenant, self.minimum_counter()) + num_tokens)

    def tenants(self) -> set[str]:
        return {task.tenant for task in self.waiting.values()}

    def minimum_counter(self) -> int:
        return min((self.counters[tenant] for tenant in self.tenants()), default=self.last_counter)

    def num_waiting(self) -> dict[str, int]:
        """In the form of the hash of counters."""
        counts: Counter[str] = Counter()
        for task in self.waiting.values():
            for name in (task.priority, tenant_hash(task.tenant)):
                counts[f"tasks:{name}"] += 1
                counts[f"tokens:{name}"] += task.cost
        return dict(counts)

    def lines(self) -> dict[tuple[int, str], tuple[int, str]]:
        """Class and tenant -> acceptance and id of the head."""
        heads: dict[tuple[int, str], tuple[int, str]] = {}
        for task_id, task in self.waiting.items():
            line, head = (task.priority, task.tenant), (task.accepted, task_id)
            heads[line] = min(heads.get(line, head), head)
        return heads

    def _turn(self, task_id: str) -> tuple[int, int, int]:
        task = self.waiting[task_id]
        return task.priority, self.counters[task.tenant], task.accepted
