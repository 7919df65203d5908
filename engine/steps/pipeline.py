"""Schedules and launches the next step before the tokens of the current one are on the host.

The results are those of running each step to its end before the next one is scheduled. A step is
launched ahead only if scheduling it can preempt no sequence and the device can sample its tokens without the
host. A launched step that fails on the device is executed again from its decision, in order.

While the next step is scheduled and launched, placeholders represent the tokens that the current step will
sample. At any other time a sequence has only tokens that the host knows.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import DeviceLost, EngineDead
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs
from engine.requests.stop_rules import StopRules
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from engine.steps.fault_isolation import ExecutedStep, StepExecutor
from engine.steps.step_report import StepRecorder

log = logging.getLogger(__name__)


class AsyncExecutor(Protocol):
    """Launches whole steps on a device without waiting for them.

    The device executes them in the order in which they were launched. `launch` reads the state of all
    sequences before it returns.
    """

    def can_launch(self, item: ScheduledSequence) -> bool:
        """Whether the device can sample this item, and start the next step, without the host."""
        ...

    def launch(self, outputs: SchedulerOutputs, after: Any) -> Any:
        """Launch the forward pass and the sampling of one token for each item that samples.

        Returns a handle. `after`: the handle of the step before; None if the host knows all tokens. A token
        id `-1 - i` is a placeholder for token `i` of that step. Raises what `Runner.execute` raises.
        """
        ...

    def fetch(self, launched: Any) -> list[SampledToken]:
        """Wait for the tokens of a handle: one for each item that samples, in order. Raises device errors."""
        ...


@dataclass(slots=True)
class InFlightStep:
    """A scheduled step that has not been returned yet.

    `handle`: what `AsyncExecutor.launch` returned; None if the step was not launched. `executed`: its
    results, if fetched ahead of its turn. `is_pending`: it was scheduled ahead, in an earlier call. Only then
    can its sequences have finished since.
    """

    outputs: SchedulerOutputs
    handle: Any = None
    executed: ExecutedStep | None = None
    is_pending: bool = False

    @property
    def has_unfinished_sequences(self) -> bool:
        return any(not item.sequence.is_finished() for item in self.outputs.scheduled)

    def drop_finished(self) -> None:
        """Remove sequences that finished after the step was scheduled."""
        if not self.is_pending:
            return
        items = self.outputs.scheduled
        kept = [item for item in items if not item.sequence.is_finished()]
        if len(kept) < len(items):
            self.outputs = self.outputs.subset(kept, is_first=True)

    def mark_pending(self) -> None:
        """Mark its tokens as in flight: their blocks are not written yet, and must not be shared."""
        self.is_pending = True
        for item in self.outputs.scheduled:
            item.sequence.num_in_flight_tokens = item.num_new_tokens

    def mark_done(self) -> None:
        if not self.is_pending:
            return
        for item in self.outputs.scheduled:
            item.sequence.num_in_flight_tokens = 0

    def placeholders(self) -> Iterator[tuple[Sequence, int]]:
        """Each sequence that samples, with the placeholder of its token: -1 - its position among them."""
        sampling = (item.sequence for item in self.outputs.scheduled if item.samples)
        return ((sequence, -1 - position) for position, sequence in enumerate(sampling))


class Pipeline:
    """Schedules, launches and finishes steps. Without an `async_executor`, steps do not overlap."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        rules: StopRules,
        async_executor: AsyncExecutor | None,
        recorder: StepRecorder,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._rules = rules
        self._async_executor = async_executor
        self._recorder = recorder
        self._pending: InFlightStep | None = None

    def step(self, isolated: list[Sequence] | None = None) -> tuple[SchedulerOutputs, ExecutedStep]:
        """Finish the oldest scheduled step, and launch the one after it if possible.

        `isolated`: schedule only these sequences and launch nothing ahead; a pending step is finished first.
        The results leave out sequences that finished meanwhile. Raises `EngineDead`.
        """
        step = self._pop_pending() or self._schedule(isolated)
        next_step = self._schedule_ahead(step) if isolated is None else None
        executed = self._finish(step, next_step)
        step.mark_done()
        if next_step:
            next_step.mark_pending()
        self._pending = next_step
        return step.outputs, executed

    def drain(self) -> None:
        """Wait for the device, so that nothing is in flight; the next `step` returns the results.

        Raises `EngineDead`.
        """
        self._pending = self._pop_pending()
        if self._pending and self._pending.executed is None:
            self._pending.executed = self._finish(self._pending, None)

    def _pop_pending(self) -> InFlightStep | None:
        """The step that was scheduled ahead; None if there is none, or all of its sequences have finished."""
        step, self._pending = self._pending, None
        if step is None or step.has_unfinished_sequences:
            return step
        if step.handle is None and step.executed is None:
            self._scheduler.rollback(step.outputs)
        return None

    def _schedule(self, isolated: list[Sequence] | None) -> InFlightStep:
        with self._recorder.stage("schedule"):
            if isolated is not None:
                return InFlightStep(self._scheduler.schedule_isolated(isolated))
            outputs = self._scheduler.schedule()
        return self._launch(outputs, None)

    def _schedule_ahead(self, step: InFlightStep) -> InFlightStep | None:
        if step.handle is None or step.executed is not None:
            return None
        with self._placeholders_of(step):
            with self._recorder.stage("schedule"):
                outputs = self._scheduler.schedule_ahead()
            return self._launch(outputs, step.handle) if outputs and outputs.scheduled else None

    @contextmanager
    def _placeholders_of(self, step: InFlightStep) -> Iterator[None]:
        """Each sequence that continues after `step` has a placeholder for its next token inside."""
        step.mark_pending()
        extended: list[Sequence] = []
        try:
            for sequence, placeholder in step.placeholders():
                if not (sequence.is_finished() or self._rules.is_last(sequence)):
                    sequence.append(placeholder)
                    extended.append(sequence)
            yield
        finally:
            for sequence in extended:
                sequence.token_ids.pop()

    def _launch(self, outputs: SchedulerOutputs, after: Any) -> InFlightStep:
        """Launch a step if the device can run it without the host. Otherwise `_finish` executes it."""
        executor, items = self._async_executor, outputs.scheduled
        # Drafts are verified on the host.
        if executor is None or not items or outputs.drafts or not all(map(executor.can_launch, items)):
            return InFlightStep(outputs)
        try:
            with self._recorder.stage("execute"):
                return InFlightStep(outputs, executor.launch(outputs, after))
        except DeviceLost as error:
            raise EngineDead(f"the device is lost: {error}") from error
        except Exception as error:  # noqa: BLE001 - models and kernels may raise anything
            self._recorder.record_fault()
            # As text: a handler that keeps the record would keep the exception, and with it the step's
            # tensors.
            log.warning("a step of %d sequences could not be launched (%s)", len(items), str(error))
            return InFlightStep(outputs)

    def _finish(self, step: InFlightStep, next_step: InFlightStep | None) -> ExecutedStep:
        executed = self._fetch(step) if step.executed is None else step.executed
        step.drop_finished()
        if executed is None:
            if next_step:
                # It was launched with tokens of the failed step: execute it again when it is its turn.
                next_step.handle = None
            return self._executor.execute(step.outputs)
        return executed.without_finished()

    def _fetch(self, step: InFlightStep) -> ExecutedStep | None:
        """The results of a launched step; None if it was not launched or failed."""
        if self._async_executor is None or step.handle is None:
            return None
        try:
            with self._recorder.stage("execute"):
                tokens = self._async_executor.fetch(step.handle)
        except DeviceLost as error:
            raise EngineDead(f"the device is lost: {error}") from error
        except Exception as error:  # noqa: BLE001 - as above
            self._recorder.record_fault()
            log.warning("a launched step failed (%s); executing it again", str(error))
            step.handle = None
            return None
        sampling = [item.sequence for item in step.outputs.scheduled if item.samples]
        return ExecutedStep(dict(zip(sampling, tokens, strict=True)))
