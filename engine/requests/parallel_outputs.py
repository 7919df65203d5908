"""The `n` outputs of a request: their seeds, and a queue order that computes their prompt once.

One output, the leader, computes the prompt; the others are deferred until it is in the prefix cache. If the
leader finishes early or fails, the next output becomes the leader. A request with one output is queued at
once. All outputs are deferred while the request's grammar is compiled.
"""

import hashlib
from collections.abc import Iterable

from engine.outputs import WaitingReason
from engine.requests.request_state import RequestState
from engine.sampling_params import SamplingParams
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
        # The scheduler refuses only outputs without tokens. They come first, so that a refusal adds nothing.
        for output in sorted(request.outputs, key=lambda output: output.sequence.num_output_tokens):
            sequence = output.sequence
            waits_for_grammar = request.needs_grammar and output is request.outputs[0]
            reason = WaitingReason.GRAMMAR if waits_for_grammar else WaitingReason.SIBLING
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


def params_of_output(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of output `index`: its own seed, and no prompt logprobs.

    Output 0 keeps the request's seed, so that its text is that of the same request with n=1. Only the leader
    computes prompt logprobs: see `RequestState.choose_leader`.
    """
    if index == 0:
        seed = params.seed
    else:
        digest = hashlib.sha256(f"{params.seed % 2**64}:{index}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big")
    return params.for_output(seed=seed, prompt_logprobs=None)


def _has_cached_its_prompt(sequence: Sequence) -> bool:
    """Blocks of a failed sequence are invalidated and cannot be found."""
    return (
        sequence.num_written_tokens >= sequence.num_prompt_tokens
        and sequence.finish_reason is not FinishReason.ERROR
    )
