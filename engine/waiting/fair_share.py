"""How tenants of one priority share the engine: who was served the fewest tokens goes first.

Law: a token is charged once, to the tenant it was computed for; what a cache gave, or a preemption made
compute again, is free. A tenant that had nothing in line gains nothing by it. After "Fairness in Serving
Large Language Models" (Sheng et al., OSDI 2024): virtual token counters. Knows no queue.
"""

from collections import Counter
from typing import Protocol

from engine.config import EngineConfig
from engine.sequence import Sequence
from engine.waiting.lazy_heap import LazyHeap

MAX_REMEMBERED_TENANTS = 10_000


class Sharing(Protocol):
    """What the waiting queue orders the lines of one standing by."""

    @property
    def is_contested(self) -> bool:
        """More than one tenant waits."""
        ...

    def line(self, tenant: str) -> str:
        """Whom `tenant` shares a line with, by name."""
        ...

    def counter(self, line: str) -> int:
        """Lower goes first."""
        ...

    def joins(self, line: str) -> None: ...

    def leaves(self, line: str) -> None: ...

    def charge(self, sequence: Sequence) -> str:
        """Charge its tenant for all that it knows and was not charged for. The line whose counter changes."""
        ...


def sharing_of(config: EngineConfig) -> Sharing:
    return FairShare() if config.fair_sharing else ByArrival()


class ByArrival:
    """One line for all tenants."""

    is_contested = False

    def line(self, tenant: str) -> str:  # noqa: ARG002 - all are one
        return ""

    def counter(self, line: str) -> int:  # noqa: ARG002
        return 0

    def joins(self, line: str) -> None: ...

    def leaves(self, line: str) -> None: ...

    def charge(self, sequence: Sequence) -> str:  # noqa: ARG002
        return ""


class FairShare:
    """A counter of tokens for each tenant, whose line bears its name.

    `joins` and `leaves` are told of each sequence that enters or leaves the line.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED_TENANTS) -> None:
        self._max_remembered = max_remembered
        self._counters: dict[str, int] = {}
        self._num_waiting: Counter[str] = Counter()
        # Of each tenant in line (counter, tenant), as the counter was when that was last looked at.
        self._entries: dict[str, tuple[int, str]] = {}
        self._least = LazyHeap[tuple[int, str]](lambda entry: self._entries.get(entry[1]) is entry)
        self._last_counter = 0

    @property
    def is_contested(self) -> bool:
        return len(self._num_waiting) > 1

    def line(self, tenant: str) -> str:
        return tenant

    def counter(self, line: str) -> int:
        return self._counters.get(line, self._last_counter)

    def joins(self, line: str) -> None:
        """One of a tenant joins the line. What it did not ask for while it was away is not owed to it."""
        if line not in self._num_waiting:
            # Put in anew, so that those who came last stand last.
            self._counters[line] = max(self._counters.pop(line, 0), self._least_counter())
            self._enter(line)
            self._forget_some()
        self._num_waiting[line] += 1

    def leaves(self, line: str) -> None:
        self._num_waiting[line] -= 1
        if not self._num_waiting[line]:
            del self._num_waiting[line], self._entries[line]
            self._last_counter = self.counter(line)

    def charge(self, sequence: Sequence) -> str:
        tenant, num_tokens = sequence.tenant, len(sequence.token_ids)
        if num_tokens > sequence.num_charged_tokens:
            counter = self._counters.get(tenant, self._last_counter)
            self._counters[tenant] = counter + num_tokens - sequence.num_charged_tokens
            sequence.num_charged_tokens = num_tokens
        return tenant

    def _least_counter(self) -> int:
        """The least of those who wait; with nobody in line, that of the tenant who left it last."""
        while (entry := self._least.top()) is not None:
            counter, tenant = entry
            if counter == self._counters[tenant]:
                return counter
            self._enter(tenant)
        return self._last_counter

    def _enter(self, tenant: str) -> None:
        self._entries[tenant] = (self._counters[tenant], tenant)
        self._least.push(self._entries[tenant])

    def _forget_some(self) -> None:
        """Of tenants with nothing in line only the latest are remembered."""
        if len(self._counters) - len(self._num_waiting) > 2 * self._max_remembered:
            away = [tenant for tenant in self._counters if tenant not in self._num_waiting]
            for tenant in away[: -self._max_remembered]:
                del self._counters[tenant]
