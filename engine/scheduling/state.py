"""The scheduler's sequences in their containers, with the slots and KV blocks that they hold.

Invariants: a sequence changes its status, its container, its slot and its blocks in one call.
"""

from engine.config import EngineConfig
from engine.outputs import WaitingReason
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.preemption_policy import PreemptionPolicy
from engine.scheduling.running import RunningSequences
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence
from engine.waiting.pool import WaitingPool


class SchedulerState:
    """What the phases of a step share: waiting and running sequences, blocks and the preemption policy."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.block_manager = BlockManager(
            config.num_kv_blocks, config.block_size, prefix_caching=config.prefix_caching
        )
        self.waiting = WaitingPool(config)
        self.running = RunningSequences(config.max_num_seqs)
        self.preemption = PreemptionPolicy(config)

    def admit(self, sequence: Sequence, num_found_tokens: int, plan: StepPlan) -> None:
        """Move a queued sequence, which holds its blocks already, to a free slot.

        `num_found_tokens`: known tokens whose blocks were found in the prefix cache.
        """
        queue = self.waiting.queue
        is_promoted = queue.is_promoted(sequence)
        queue.remove(sequence)
        sequence.admit(
            self.running.allocate_slot(),
            num_found_tokens,
            now=plan.now,
            is_pinned=self.preemption.must_pin(sequence),
            is_promoted=is_promoted,
        )
        self.running.add(sequence)
        plan.admitted.append(sequence)

    def preempt(self, victim: Sequence, reason: WaitingReason, plan: StepPlan) -> None:
        """Move a running sequence back to its position in the queue. `reason`: the limit that required it."""
        self.block_manager.publish(victim)
        self.release(victim)
        victim.preempt(plan.now)
        self.waiting.queue.add(victim)
        plan.preempted.append(victim)
        plan.skip(victim, reason)

    def release(self, sequence: Sequence) -> None:
        """Free the slot and the blocks of a running sequence."""
        self.running.remove(sequence)
        self.block_manager.free(sequence)
