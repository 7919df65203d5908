"""Speculative decoding: drafts tokens that a step verifies while it decodes.

A drafted token is kept only if it is the token that is sampled in its place, so drafts change no output.

Invariants: drafts preempt no sequence, and take neither blocks nor tokens of a step that another could use.
"""

from engine.config import EngineConfig
from engine.outputs import ScheduledSequence, WaitingReason
from engine.scheduling.prompt_lookup import PromptLookup
from engine.scheduling.state import SchedulerState
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence

MAX_ROWS = 16
"""Decode rows of a step with drafts, powers of two like the drafts with the row before them.

SmolLM2 in float32 on two cores with AVX-512 took 11.3 ms for one row, 13.2 for 4, 15.5 for 8, 19.6 for 16 and
28.7 for 32: with more rows the linear layers are bound by computation.
"""


class DraftScheduler:
    """Adds drafted tokens to the decodes of a step, and learns from what became of them."""

    def __init__(self, config: EngineConfig, state: SchedulerState) -> None:
        self._config = config
        self._blocks = state.block_manager
        # By slot: the sequence that holds it, with what is known of it.
        self._lookups: dict[int | None, PromptLookup] = {}

    def schedule(self, plan: StepPlan) -> None:
        """Add drafts to `plan`, whose decodes and prefills are decided."""
        config, decode = self._config, plan.decode
        if not config.num_speculative_tokens or not decode or plan.prefills:
            return
        if any(skipped.reason is WaitingReason.KV_BLOCKS for skipped in plan.skipped):
            return
        num_rows = min(MAX_ROWS - len(decode), plan.budget.remaining_tokens)
        if num_rows < len(decode):
            return
        maximum = min(config.num_speculative_tokens, num_rows // len(decode))
        for item in tuple(decode):
            sequence = item.sequence
            if draft := self._draft(sequence, maximum):
                plan.drafts[sequence] = draft
        if plan.drafts:
            plan.decode = [
                row for item in decode for row in _rows_of(item, plan.drafts.get(item.sequence, ()))
            ]
            plan.budget.add(len(plan.decode) - len(decode), 0)

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """The step accepted the first `num_accepted` drafted tokens of a sequence."""
        lookup = self._lookups.get(sequence.slot)
        if lookup is not None and lookup.sequence is sequence:
            lookup.adapt(num_drafted, num_accepted)

    def _draft(self, sequence: Sequence, maximum: int) -> tuple[int, ...]:
        if sequence.may_be_processed:
            return ()
        lookup = self._lookups.get(sequence.slot)
        # By identity, since another sequence may have taken the slot.
        if lookup is None or lookup.sequence is not sequence:
            lookup = self._lookups[sequence.slot] = PromptLookup(sequence)
        num_tokens, max_tokens = sequence.num_tokens, sequence.params.max_tokens
        num_left = min(self._config.max_model_len, self._config.kv_capacity) - num_tokens
        if max_tokens is not None:
            # The token after the last draft is sampled too.
            num_left = min(num_left, max_tokens - sequence.num_output_tokens - 1)
        draft = lookup.draft(min(maximum, num_left))
        num_positions = self._blocks.extend(sequence, num_tokens + len(draft)) if draft else 0
        return draft[: max(0, num_positions - num_tokens)]


def _rows_of(item: ScheduledSequence, draft: tuple[int, ...]) -> list[ScheduledSequence]:
    """The decode of a sequence, and one for each drafted token after it."""
    sequence, start = item.sequence, item.start
    return [item, *(ScheduledSequence(sequence, start + 1 + row, 1, 0, True) for row in range(len(draft)))]
