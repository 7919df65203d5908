"""When all slots are taken: whether the head of the line may have another's, and its right to it then.

Law: a slot is taken only from one of strictly lower priority, and only for a head that can then be taken in.
Until that one is in, nobody goes before it but one that was promoted. Chooses; takes nothing away.
"""

from engine.scheduling.block_manager import BlockManager
from engine.scheduling.preemption import Preemption
from engine.scheduling.running import Running, by_need
from engine.sequence import Sequence
from engine.waiting.queue import WaitingQueue


class SlotPreemption:
    """Looks at the `line`, at those `running`, and at what `blocks` are free; remembers one claimant."""

    def __init__(
        self, line: WaitingQueue, running: Running, blocks: BlockManager, preemption: Preemption
    ) -> None:
        self._line = line
        self._running = running
        self._blocks = blocks
        self._preemption = preemption
        # Another gave up its slot for it, so nobody skips ahead of it.
        self._claimant: Sequence | None = None

    def may_arise(self) -> bool:
        """All slots are taken, the last in order by one of lower priority than the head's."""
        line, running = self._line, self._running
        return bool(not running.slots and line and line.best_priority < running.queue[-1].priority)

    def claim(self) -> Sequence | None:
        """Who is to lose its slot for the head, which claims it; None: nobody."""
        line = self._line
        if not self.may_arise() or line.is_head_promoted:
            return None
        head = line.head
        assert head is not None
        victim = self._preemption.victim_for_slot(self._running.queue, head)
        if victim is None or not self._can_take_in(head, victim):
            return None
        self._claimant = head
        return victim

    def next_in_line(self) -> Sequence | None:
        """The head; before it the claimant, whose victim may have aged to be the head."""
        is_head_next = self._claimant is None or self._line.is_head_promoted
        return self._line.head if is_head_next else self._claimant

    def guards(self, sequence: Sequence) -> bool:
        """Nobody may go past it while it waits: it is the claimant, or a promoted one waits."""
        return self._line.is_head_promoted or sequence is self._claimant

    def forget(self, sequence: Sequence) -> None:
        """It was taken in, or has ended."""
        if sequence is self._claimant:
            self._claimant = None

    def _can_take_in(self, head: Sequence, victim: Sequence) -> bool:
        """Whether `head` would be taken into this step, if `victim` held nothing."""
        decoding, prefilling = by_need([one for one in self._running.queue if one is not victim])
        return self._preemption.leaves_room(head, len(decoding), len(prefilling)) and (
            self._blocks.can_allocate(
                self._preemption.num_tokens_to_hold(head), self._blocks.find_prefix(head), without=victim
            )
        )
