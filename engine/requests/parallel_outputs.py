"""Outputs of one request: one computes the prompt that they share, the others wait to find it computed.

Law: of each request with outputs that wait for it, exactly one leads; if it ends too early or fails, the next
takes its place. Knows nothing of texts and times.
"""

from collections.abc import Iterable

from engine.outputs import WaitingReason
from engine.requests.request_state import Request
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence


class ParallelOutputs:
    """Takes requests to the scheduler, and lets their outputs into the line when their time has come."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._led: dict[Sequence, Request] = {}

    def hold(self, request: Request) -> None:
        """Take all outputs, none into the line yet. Raises `NeverFits`, and takes none."""
        # If any is refused it is one without tokens: these come first, while nothing has been taken.
        for output in sorted(request.outputs, key=lambda one: one.sequence.num_output_tokens):
            is_first = output is request.outputs[0]
            reason = WaitingReason.GRAMMAR if is_first and request.needs_grammar else WaitingReason.SIBLING
            self._scheduler.add_sequence(output.sequence, held=reason)

    def start(self, request: Request) -> None:
        """End what was at its end when it was resumed, and let the first of the others into the line."""
        for output in request.outputs:
            if output.end:
                self._scheduler.abort(output.sequence, output.end)
        self._lead(request)

    def settle(self, touched: Iterable[Sequence]) -> None:
        """Of sequences that were stepped or ended: let those go on who waited for them."""
        if not self._led:
            return
        for sequence in touched:
            if (request := self._led.get(sequence)) is None:
                continue
            if _has_shared_its_prompt(sequence):
                del self._led[sequence]
                self._release_all(request, but=sequence)
            elif sequence.is_finished():
                del self._led[sequence]
                self._lead(request)

    def _lead(self, request: Request) -> None:
        if (head := request.choose_head()) is None:
            return
        self._scheduler.release(head)
        if len(request.outputs) > 1:
            self._led[head] = request

    def _release_all(self, request: Request, *, but: Sequence) -> None:
        for output in request.outputs:
            if output.sequence is not but and not output.sequence.is_finished():
                self._scheduler.release(output.sequence)


def _has_shared_its_prompt(sequence: Sequence) -> bool:
    """What one computed that failed is not trusted, and cannot be found."""
    return (
        sequence.num_written_tokens >= sequence.num_prompt_tokens
        and sequence.finish_reason is not FinishReason.ERROR
    )
