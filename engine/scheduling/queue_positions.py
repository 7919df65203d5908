"""The positions of waiting sequences and requests, as reported to clients. No decision depends on them."""

import itertools
from dataclasses import dataclass

from engine.outputs import WaitingReason
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePosition:
    """A waiting output of a request.

    `position` counts from 1. `tokens_ahead`: tokens to compute before it.
    """

    request_id: str
    index: int = 0
    position: int
    tokens_ahead: int
    reason: WaitingReason


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPosition:
    """A request of which no output runs: the number of requests before it, and why it waits."""

    request_id: str
    requests_ahead: int
    tokens_ahead: int
    reason: WaitingReason


def request_positions(scheduler: Scheduler) -> list[RequestPosition]:
    """One entry for each waiting request, in the order of `queue_positions`."""
    running_ids = {sequence.request_id for sequence in scheduler.running_queue}
    first_outputs: dict[str, QueuePosition] = {}
    for position in queue_positions(scheduler):
        first_outputs.setdefault(position.request_id, position)
    return [
        RequestPosition(
            request_id=request_id,
            requests_ahead=requests_ahead,
            tokens_ahead=first.tokens_ahead,
            reason=first.reason,
        )
        for requests_ahead, (request_id, first) in enumerate(first_outputs.items())
        if request_id not in running_ids
    ]


def queue_positions(scheduler: Scheduler) -> list[QueuePosition]:
    """The queue from its head, then the deferred sequences."""
    positions: list[QueuePosition] = []
    sequences = itertools.chain(scheduler.waiting_queue, scheduler.deferred_sequences)
    max_model_len = scheduler.config.max_model_len
    tokens_ahead = sum(_num_remaining_tokens(one, max_model_len) for one in scheduler.running_queue)
    for position, sequence in enumerate(sequences, start=1):
        positions.append(
            QueuePosition(
                request_id=sequence.request_id,
                index=sequence.index,
                position=position,
                tokens_ahead=tokens_ahead,
                reason=scheduler.waiting_reason(sequence),
            )
        )
        tokens_ahead += _num_remaining_tokens(sequence, max_model_len)
    return positions


def _num_remaining_tokens(sequence: Sequence, max_model_len: int) -> int:
    """Known tokens left to compute, plus the maximum number left to generate."""
    room = max_model_len - sequence.num_prompt_tokens
    limit = min(sequence.params.max_tokens or room, room)
    return sequence.num_uncomputed_tokens + max(0, limit - sequence.num_output_tokens)
