"""Runs what was decided: forward pass and sampling, so that one bad request fails alone.

Law: a failure is bisected until the guilty request stands alone; the engine is dead only if the device cannot
even run a forward pass of nothing, or has no memory for any of several requests. Knows no scheduling.

Nothing is executed while an exception of a failed try exists: its traceback holds the frames of that try, and
these its tensors. Only text is kept of it.
"""

import logging
import traceback
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import DeviceLost, EngineDead
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.sequence import Sequence
from engine.steps.step_timer import StepTimer

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Executes decisions on a device. Logits are whatever its sampler understands."""

    def execute(self, outputs: SchedulerOutputs) -> Any:
        """The logits of the wanted rows, in the order of `outputs.scheduled`.

        May be called again with a part of the same decision. Raises `DeviceLost` when nothing will work, and
        `MemoryError` when there is not enough memory for this much.
        """
        ...

    def check(self) -> None:
        """Run a forward pass that touches no sequence; raises if the device cannot."""
        ...

    def release_memory(self) -> bool:
        """Return cached memory that no tensor uses to the device; whether there was any.

        Called once in a step that ran out of memory. Raises `DeviceLost`.
        """
        ...


class Sampler(Protocol):
    def sample(self, logits: Any, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        """One token, or the reason why there is none, for each item that samples, in order."""
        ...

    def prompt_logprobs(
        self, logits: Any, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        """For each item that asks for them: those of the prompt tokens behind its wanted rows, in order."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """What came of a step: a token or an error for each sequence that samples, an error for each that failed.

    `prompt_logprobs`: where a request asks for them, those of the prompt tokens `start + 1` and on, where
    `start` is the first token of this step whose logits were wanted. None of a sequence that failed.
    """

    tokens: dict[Sequence, SampledToken] = field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)

    def __or__(self, other: "ExecutedStep") -> "ExecutedStep":
        """Both, of two parts of one step."""
        return ExecutedStep(self.tokens | other.tokens, self.prompt_logprobs | other.prompt_logprobs)

    def without_the_ended(self) -> "ExecutedStep":
        """The same, but of sequences that have ended since nothing."""
        return ExecutedStep(
            {one: token for one, token in self.tokens.items() if not one.is_finished()},
            {one: found for one, found in self.prompt_logprobs.items() if not one.is_finished()},
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """What is kept of an exception. `reason`: its type and message; `details`: its traceback, as text."""

    reason: str
    details: str
    is_out_of_memory: bool

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        details = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__}: {error}"[:500], details, isinstance(error, MemoryError))


class StepExecution:
    """A runner and its sampler, with their failures kept to the requests that cause them."""

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler
        self._num_starved = 0
        self._has_released_memory = False

    def run(self, outputs: SchedulerOutputs, timer: StepTimer) -> ExecutedStep:
        """Execute what was decided, in parts where a request is at fault.

        Raises `EngineDead` when nothing can be executed any more.
        """
        num_starved = self._num_starved
        self._has_released_memory = False
        try:
            executed = self._run_or_split(outputs, timer) if outputs.scheduled else ExecutedStep()
        except DeviceLost as error:
            raise EngineDead(f"the device is lost: {error}") from error
        if 1 < len(outputs.scheduled) == self._num_starved - num_starved:
            raise EngineDead("the device has no memory for any part of the step")
        return executed

    def _run_or_split(self, outputs: SchedulerOutputs, timer: StepTimer) -> ExecutedStep:
        result = self._try(outputs, timer)
        if isinstance(result, _Failure) and result.is_out_of_memory and self._release_memory():
            result = self._try(outputs, timer)
        if isinstance(result, ExecutedStep):
            return result
        items = outputs.scheduled
        if len(items) == 1:
            return ExecutedStep({items[0].sequence: self._blame(items[0].sequence, result)})
        log.warning("a step of %d sequences failed (%s); trying its halves", len(items), result.reason)
        half = len(items) // 2
        first = outputs.only(items[:half], is_first=True)
        second = outputs.only(items[half:], is_first=False)
        return self._run_or_split(first, timer) | self._run_or_split(second, timer)

    def _try(self, outputs: SchedulerOutputs, timer: StepTimer) -> ExecutedStep | _Failure:
        """The exception is gone when this returns. Raises `DeviceLost`."""
        try:
            return self._run(outputs, timer)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - models and kernels raise what they like
            timer.num_faults += 1
            return _Failure.of(error)

    def _release_memory(self) -> bool:
        """Once in a step, since it waits for the device; whether a retry may find more memory."""
        if self._has_released_memory:
            return False
        self._has_released_memory = True
        return self._runner.release_memory()

    def _run(self, outputs: SchedulerOutputs, timer: StepTimer) -> ExecutedStep:
        with timer.stage("execute"):
            logits = self._runner.execute(outputs)
        items = outputs.scheduled
        sampling = [item.sequence for item in items if item.samples]
        executed = ExecutedStep()
        with timer.stage("sample"):
            if sampling:
                executed.tokens.update(zip(sampling, self._sampler.sample(logits, items), strict=True))
            if any(item.sequence.params.prompt_logprobs is not None for item in outputs.prefill):
                found = self._sampler.prompt_logprobs(logits, items)
                executed.prompt_logprobs.update((item.sequence, logprobs) for item, logprobs in found)
        return executed

    def _blame(self, sequence: Sequence, failure: _Failure) -> SampledToken:
        """It failed alone. If the device runs a pass of nothing, the request is at fault, not the device."""
        log.error("request %s failed alone\n%s", sequence.request_id, failure.details.rstrip())
        try:
            self._runner.check()
        except Exception as broken:
            raise EngineDead(f"no forward pass works any more: {broken}") from broken
        self._num_starved += failure.is_out_of_memory
        return SampledToken(None, failure.reason)
