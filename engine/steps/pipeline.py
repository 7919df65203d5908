"""One step decided and launched before the tokens of the one before it are on the host.

Law: what each request gets is what it would get if each step ended before the next one is decided. A step
goes ahead only if it takes nothing from anybody, and only if its tokens can be drawn without the host; what
fails on the device is executed again from its decision, in order. Knows neither texts nor tensors.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from engine.errors import DeviceLost, EngineDead
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs
from engine.requests.stop_rules import StopRules
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence
from engine.steps.fault_isolation import ExecutedStep, StepExecution
from engine.steps.in_flight import InFlight, placeholders
from engine.steps.step_timer import StepTimer

log = logging.getLogger(__name__)


class AsyncExecutor(Protocol):
    """Gives a device the whole of a step to do, and does not wait for it.

    The device does what it is given in that order. What is read of sequences is read before `launch` returns.
    """

    def takes(self, item: ScheduledSequence) -> bool:
        """Whether the host is not needed between this item's forward pass and the next step's."""
        ...

    def launch(self, outputs: SchedulerOutputs, after: Any) -> Any:
        """Compute, and draw a token for each item that samples.

        `after`: what this gave for the step before, None if the host knows all tokens. A token id of
        `-1 - place` stands for the token at `place` of that step's. Raises what `Runner.execute` raises.
        """
        ...

    def fetch(self, launched: Any) -> list[SampledToken]:
        """Wait for the tokens, one for each item that samples, in order. Raises what a device raises."""
        ...


class Pipeline:
    """Decides, launches and finishes steps; `launcher` None: each ends before the next one is decided."""

    def __init__(
        self, scheduler: Scheduler, execution: StepExecution, rules: StopRules, launcher: AsyncExecutor | None
    ) -> None:
        self._scheduler = scheduler
        self._execution = execution
        self._rules = rules
        self._launcher = launcher
        self._next: InFlight | None = None

    def step(
        self, taking_part: list[Sequence] | None, timer: StepTimer
    ) -> tuple[SchedulerOutputs, ExecutedStep]:
        """Finish the oldest step that was decided, with the one after it under way where that can be.

        `taking_part`: decide on these alone, and go no further; what is under way is finished first. Nothing
        of sequences that have ended is in what this gives. Raises `EngineDead`.
        """
        step = self._take_next() or self._begin(taking_part, timer)
        following = self._go_ahead(step, timer) if taking_part is None else None
        executed = self._finish(step, following, timer)
        step.note_ended()
        if following:
            following.note_under_way()
        self._next = following
        return step.outputs, executed

    def drain(self, timer: StepTimer) -> None:
        """Wait for the device, so that nothing is under way; the next `step` gives what came of it.

        Raises `EngineDead`.
        """
        self._next = self._take_next()
        if self._next and self._next.executed is None:
            self._next.executed = self._finish(self._next, None, timer)

    def _take_next(self) -> InFlight | None:
        """What was decided ahead, without those that have ended since; None if that leaves nobody."""
        step, self._next = self._next, None
        if step is None or step.is_wanted:
            return step
        if step.launched is None and step.executed is None:
            self._scheduler.rollback(step.outputs)
        return None

    def _begin(self, taking_part: list[Sequence] | None, timer: StepTimer) -> InFlight:
        with timer.stage("schedule"):
            outputs = self._scheduler.schedule(taking_part)
        return InFlight(outputs) if taking_part is not None else self._launch(outputs, None, timer)

    def _go_ahead(self, step: InFlight, timer: StepTimer) -> InFlight | None:
        if step.launched is None or step.executed is not None:
            return None
        with self._assumed(step):
            with timer.stage("schedule"):
                outputs = self._scheduler.schedule_ahead()
            return self._launch(outputs, step.launched, timer) if outputs and outputs.scheduled else None

    @contextmanager
    def _assumed(self, step: InFlight) -> Iterator[None]:
        """Each sequence that goes on after `step` has its next token, or what stands for it."""
        step.note_under_way()
        assumed: list[Sequence] = []
        try:
            for sequence, placeholder in placeholders(step.outputs.scheduled):
                if not (sequence.is_finished() or self._rules.is_last(sequence)):
                    sequence.append(placeholder)
                    assumed.append(sequence)
            yield
        finally:
            for sequence in assumed:
                sequence.token_ids.pop()

    def _launch(self, outputs: SchedulerOutputs, after: Any, timer: StepTimer) -> InFlight:
        """Launch a step if that can be. Otherwise, or if it fails, it is executed when it is finished."""
        launcher, items = self._launcher, outputs.scheduled
        if launcher is None or not items or not all(map(launcher.takes, items)):
            return InFlight(outputs)
        try:
            with timer.stage("execute"):
                return InFlight(outputs, launcher.launch(outputs, after))
        except DeviceLost as error:
            raise EngineDead(f"the device is lost: {error}") from error
        except Exception as error:  # noqa: BLE001 - models and kernels raise what they like
            timer.num_faults += 1
            # As text: a handler that keeps the record would keep the exception, and that the step's tensors.
            log.warning("a step of %d sequences could not be launched (%s)", len(items), str(error))
            return InFlight(outputs)

    def _finish(self, step: InFlight, following: InFlight | None, timer: StepTimer) -> ExecutedStep:
        executed = self._fetch(step, timer) if step.executed is None else step.executed
        step.drop_the_ended()
        if executed is None:
            if following:
                # It went on from what never came: its own turn comes, with tokens that the host knows.
                following.launched = None
            return self._execution.run(step.outputs, timer)
        return executed.without_the_ended()

    def _fetch(self, step: InFlight, timer: StepTimer) -> ExecutedStep | None:
        """What came of a step that was launched; None if it was not, or failed."""
        if self._launcher is None or step.launched is None:
            return None
        try:
            with timer.stage("execute"):
                tokens = self._launcher.fetch(step.launched)
        except DeviceLost as error:
            raise EngineDead(f"the device is lost: {error}") from error
        except Exception as error:  # noqa: BLE001 - as above
            timer.num_faults += 1
            log.warning("a step that was launched failed (%s); executing it again", str(error))
            step.launched = None
            return None
        sampling = [item.sequence for item in step.outputs.scheduled if item.samples]
        return ExecutedStep(dict(zip(sampling, tokens, strict=True)))
