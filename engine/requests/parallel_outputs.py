"""Queues the outputs of a request so that the prompt they share is computed once.

One output, the leader, computes the prompt; the others are deferred until it is in the prefix cache. If the
leader finishes early or fails, the next output takes its place. A request with one output goes straight into
the queue. All outputs are deferred while the request's grammar is compiled.
"""

from collections.abc import Iterable

from engine.outputs import WaitingReason
from engine.requests.request_state import RequestState
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence


class ParallelOutputs:
    """Adds requests to the scheduler, and enqueues deferred outputs when they may be scheduled."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._leaders: dict[Sequence, RequestState] = {}

    @property
    def num_leaders(self) -> int:
        """Requests with outputs that wait for their prompt."""
        return len(self._leaders)

    def add(self, request: RequestState) -> None:
        """Queue the leader and defer the other outputs; defer all if the request needs a grammar.

        Raises `NeverFits` and adds nothing.
        """
        leader = None if request.needs_grammar else request.choose_leader()
        # The scheduler only refuses outputs without tokens. They come first, before anything is added.
        for output in sorted(request.outputs, key=lambda output: output.sequence.num_output_tokens):
            sequence = output.sequence
            is_compiled_for = request.needs_grammar and output is request.outputs[0]
            reason = WaitingReason.GRAMMAR if is_compiled_for else WaitingReason.SIBLING
            self._scheduler.add_sequence(sequence, deferred=None if sequence is leader else reason)
        if not request.needs_grammar:
            self._finish_resumed(request)
            self._set_leader(leader, request)

    def start(self, request: RequestState) -> None:
        """The request's grammar is compiled: queue its leader."""
        self._finish_resumed(request)
        self._replace_leader(request)

    def enqueue_followers(self, stepped: Iterable[Sequence]) -> None:
        """Enqueue the outputs that waited for one of `stepped`, which a step has computed or finished."""
        if not self._leaders:
            return
        for sequence in stepped:
            if (request := self._leaders.get(sequence)) is None:
                continue
            if _has_cached_its_prompt(sequence):
                del self._leaders[sequence]
                self._enqueue_all(request)
            elif sequence.is_finished():
                del self._leaders[sequence]
                self._replace_leader(request)

    def _finish_resumed(self, request: RequestState) -> None:
        """Finish outputs that were already complete when they were resumed."""
        for output in request.outputs:
            if output.resumed_finish_reason:
                self._scheduler.abort(output.sequence, output.resumed_finish_reason)

    def _replace_leader(self, request: RequestState) -> None:
        leader = request.choose_leader()
        if leader is not None:
            self._scheduler.enqueue(leader)
        self._set_leader(leader, request)

    def _set_leader(self, leader: Sequence | None, request: RequestState) -> None:
        if leader is not None and len(request.outputs) > 1:
            self._leaders[leader] = request

    def _enqueue_all(self, request: RequestState) -> None:
        for output in request.outputs:
            if not output.sequence.is_finished():
                self._scheduler.enqueue(output.sequence)


def _has_cached_its_prompt(sequence: Sequence) -> bool:
    """Blocks of a failed sequence are invalidated and cannot be found."""
    return (
        sequence.num_written_tokens >= sequence.num_prompt_tokens
        and sequence.finish_reason is not FinishReason.ERROR
    )
