"""The sequences of one step, for whoever shows the step: what each computed, or why it waited."""

import itertools
from collections.abc import Iterable, Iterator

from engine.outputs import Lane, SchedulerOutputs
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus

MAX_LANES = 256
"""Lanes of waiting sequences in one report. `StepReport.waiting_reasons` counts the others."""


def step_lanes(scheduled: SchedulerOutputs, scheduler: Scheduler) -> tuple[Lane, ...]:
    """Sequences that the step computed, then running ones that it left out, then waiting ones.

    The order of the queue is computed only if it is short: the cost does not grow with the queue.
    """
    lanes: dict[Sequence, Lane] = {}
    for state, items in (("decode", scheduled.decode), ("prefill", scheduled.prefill)):
        for item in items:
            sequence = item.sequence
            # A drafted token is an item of its own.
            before = lanes[sequence].num_tokens if sequence in lanes else 0
            lanes[sequence] = Lane(sequence.request_id, sequence.index, state, before + item.num_new_tokens)
    reasons = {skipped.sequence: skipped.reason.value for skipped in scheduled.skipped}
    for sequence in scheduler.running_queue:
        if sequence not in lanes:
            lanes[sequence] = _idle_lane(sequence, "waiting", reasons.get(sequence, ""))
    waiting = (one for one in _waiting(scheduled, scheduler) if one not in lanes)
    for sequence in itertools.islice(waiting, MAX_LANES):
        state = "preempted" if sequence.num_preemptions else "waiting"
        lanes[sequence] = _idle_lane(sequence, state, scheduler.waiting_reason(sequence).value)
    return tuple(lanes.values())


def _idle_lane(sequence: Sequence, state: str, reason: str) -> Lane:
    return Lane(sequence.request_id, sequence.index, state, 0, reason)


def _waiting(scheduled: SchedulerOutputs, scheduler: Scheduler) -> Iterator[Sequence]:
    """All waiting sequences in order, or those that the step examined if there are many."""
    sequences: Iterable[Sequence]
    if scheduler.num_waiting <= MAX_LANES:
        sequences = itertools.chain(scheduler.waiting_queue, scheduler.deferred_sequences)
    else:
        sequences = (skipped.sequence for skipped in scheduled.skipped)
    return (one for one in sequences if one.status is SequenceStatus.WAITING and one.slot is None)
