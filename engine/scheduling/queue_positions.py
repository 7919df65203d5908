"""Where those who wait stand, and for what: for people who ask, not for deciding."""

import itertools
from dataclasses import dataclass

from engine.outputs import WaitingReason
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """An output of a request that waits: `position` from 1, tokens to compute before it, and why it waits."""

    request_id: str
    index: int = 0
    position: int
    tokens_ahead: int
    reason: WaitingReason


def queue_positions(scheduler: Scheduler) -> list[QueuePosition]:
    """The line from its head, then those that are held outside of it."""
    line: list[QueuePosition] = []
    sequences = itertools.chain(scheduler.waiting_queue, scheduler.held_sequences)
    max_model_len = scheduler.config.max_model_len
    tokens_ahead = sum(_num_tokens_to_come(one, max_model_len) for one in scheduler.running_queue)
    for position, sequence in enumerate(sequences, start=1):
        line.append(
            QueuePosition(
                request_id=sequence.request_id,
                index=sequence.index,
                position=position,
                tokens_ahead=tokens_ahead,
                reason=scheduler.waiting_reason(sequence),
            )
        )
        tokens_ahead += _num_tokens_to_come(sequence, max_model_len)
    return line


def _num_tokens_to_come(sequence: Sequence, max_model_len: int) -> int:
    room = max_model_len - sequence.num_prompt_tokens
    most = min(sequence.params.max_tokens or room, room)
    return sequence.num_uncomputed_tokens + max(0, most - sequence.num_output_tokens)
