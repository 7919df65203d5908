"""Executes a scheduling decision so that one bad request fails alone.

A failed step is bisected until each failing request runs alone. The engine is dead only if the device cannot
run a dummy forward pass, or if each of several requests alone runs out of memory.

Only the text of a failure is kept: the traceback of an exception references the frames of the attempt and
thereby its tensors, which must be freed before the next attempt.
"""

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.errors import DeviceLost, EngineDead
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.sequence import Sequence
from engine.steps.step_report import StepRecorder

log = logging.getLogger(__name__)


class Runner(Protocol):
    """Executes decisions on a device. Only its sampler reads its logits."""

    def execute(self, outputs: SchedulerOutputs) -> Any:
        """The logits of the requested rows, in the order of `outputs.scheduled`.

        May be called again with a part of the same decision. Raises `DeviceLost` if nothing can be executed
        any more, and `MemoryError` if the device lacks memory for this decision.
        """
        ...

    def check(self) -> None:
        """Run a dummy forward pass that touches no sequence. Raises any exception if the device cannot."""
        ...

    def release_memory(self) -> bool:
        """Release cached memory that is not in use. Returns False if there was none.

        Called at most once per step, after it ran out of memory. Raises `DeviceLost`.
        """
        ...


class Sampler(Protocol):
    def sample(self, logits: Any, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        """A token or an error for each item that samples, in order."""
        ...

    def prompt_logprobs(
        self, logits: Any, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        """For each item that requests them: those of the prompt tokens after its requested rows, in order."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutedStep:
    """Results of a step: a token or an error for each sequence that samples, an error for each that failed.

    `prompt_logprobs`: of sequences that request them and did not fail, those of prompt tokens `start + 1`
    onwards, where `start` is the first token of this step whose logits were requested. `accepted`: of
    sequences whose first drafted tokens are the sampled ones, the tokens or the error after each of those.
    """

    tokens: dict[Sequence, SampledToken] = field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[TokenLogprobs]] = field(default_factory=dict)
    accepted: dict[Sequence, list[SampledToken]] = field(default_factory=dict)

    def __or__(self, other: "ExecutedStep") -> "ExecutedStep":
        """The results of two parts of one step, which has no drafts."""
        return ExecutedStep(self.tokens | other.tokens, self.prompt_logprobs | other.prompt_logprobs)

    def accepted_tokens(self) -> Iterator[dict[Sequence, SampledToken]]:
        """For each drafted token in turn: what follows it, by sequence. Finished sequences are left out."""
        position = 0
        while tokens := {
            sequence: sampled[position]
            for sequence, sampled in self.accepted.items()
            if position < len(sampled) and not sequence.is_finished()
        }:
            yield tokens
            position += 1

    def without_finished(self) -> "ExecutedStep":
        """Drops results of sequences that finished meanwhile."""
        return ExecutedStep(
            {sequence: token for sequence, token in self.tokens.items() if not sequence.is_finished()},
            {
                sequence: found
                for sequence, found in self.prompt_logprobs.items()
                if not sequence.is_finished()
            },
        )


@dataclass(frozen=True, slots=True)
class _Failure:
    """The text of an exception. `reason`: type and message; `details`: traceback."""

    reason: str
    details: str
    is_out_of_memory: bool

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        details = "".join(traceback.format_exception(error))
        return cls(f"{type(error).__name__}: {error}"[:500], details, isinstance(error, MemoryError))


class StepExecutor:
    """Executes decisions with a runner and a sampler, and attributes failures to single requests."""

    def __init__(self, runner: Runner, sampler: Sampler, recorder: StepRecorder) -> None:
        self._runner = runner
        self._sampler = sampler
        self._recorder = recorder
        self._num_out_of_memory = 0
        self._has_released_memory = False

    def execute(self, outputs: SchedulerOutputs) -> ExecutedStep:
        """Execute a decision, in parts if a request fails.

        Raises `EngineDead` if nothing can be executed any more.
        """
        self._num_out_of_memory = 0
        self._has_released_memory = False
        try:
            executed = self._execute_or_bisect(outputs) if outputs.scheduled else ExecutedStep()
        except DeviceLost as error:
            raise EngineDead(f"the device is lost: {error}") from error
        num_requests = len({item.sequence for item in outputs.scheduled}) if self._num_out_of_memory else 0
        if num_requests > 1 and self._num_out_of_memory == num_requests:
            raise EngineDead("the device has no memory for any part of the step")
        return executed

    def _execute_or_bisect(self, outputs: SchedulerOutputs) -> ExecutedStep:
        result = self._try_execute(outputs)
        if isinstance(result, _Failure) and outputs.drafts:
            outputs = outputs.without_drafts()
            result = self._try_execute(outputs)
        if isinstance(result, _Failure) and result.is_out_of_memory and self._release_memory():
            result = self._try_execute(outputs)
        if isinstance(result, ExecutedStep):
            return result
        items = outputs.scheduled
        if len(items) == 1:
            return ExecutedStep({items[0].sequence: self._fail(items[0].sequence, result)})
        log.warning("a step of %d sequences failed (%s); executing its halves", len(items), result.reason)
        half = len(items) // 2
        first = outputs.subset(items[:half], is_first=True)
        second = outputs.subset(items[half:], is_first=False)
        return self._execute_or_bisect(first) | self._execute_or_bisect(second)

    def _try_execute(self, outputs: SchedulerOutputs) -> ExecutedStep | _Failure:
        """Returns an exception as text, so that its tensors are freed. Raises `DeviceLost`."""
        try:
            return self._execute(outputs)
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 - models and kernels may raise anything
            self._recorder.record_fault()
            return _Failure.of(error)

    def _release_memory(self) -> bool:
        """Once per step, since it waits for the device. Returns whether a retry may find more memory."""
        if self._has_released_memory:
            return False
        self._has_released_memory = True
        return self._runner.release_memory()

    def _execute(self, outputs: SchedulerOutputs) -> ExecutedStep:
        with _appended(outputs.drafts):
            return self._execute_with_drafts(outputs)

    def _execute_with_drafts(self, outputs: SchedulerOutputs) -> ExecutedStep:
        with self._recorder.stage("execute"):
            logits = self._runner.execute(outputs)
        items = outputs.scheduled
        sampling = [item.sequence for item in items if item.samples]
        executed = ExecutedStep()
        with self._recorder.stage("sample"):
            if sampling:
                sampled = zip(sampling, self._sampler.sample(logits, items), strict=True)
                if outputs.drafts:
                    verify(outputs.drafts, sampled, executed)
                else:
                    executed.tokens.update(sampled)
            if any(item.sequence.params.prompt_logprobs is not None for item in outputs.prefill):
                found = self._sampler.prompt_logprobs(logits, items)
                executed.prompt_logprobs.update((item.sequence, logprobs) for item, logprobs in found)
        return executed

    def _fail(self, sequence: Sequence, failure: _Failure) -> SampledToken:
        """The error of a request that failed alone. Raises `EngineDead` if the device is broken."""
        log.error("request %s failed alone\n%s", sequence.request_id, failure.details.rstrip())
        try:
            self._runner.check()
        except Exception as broken:
            raise EngineDead(f"a dummy forward pass failed: {broken}") from broken
        self._num_out_of_memory += failure.is_out_of_memory
        return SampledToken(None, failure.reason)


@contextmanager
def _appended(drafts: Mapping[Sequence, tuple[int, ...]]) -> Iterator[None]:
    """The drafted tokens are the last tokens of their sequences inside."""
    for sequence, token_ids in drafts.items():
        sequence.token_ids += token_ids
    try:
        yield
    finally:
        for sequence, token_ids in drafts.items():
            del sequence.token_ids[-len(token_ids) :]


def verify(
    drafts: Mapping[Sequence, tuple[int, ...]],
    sampled: Iterator[tuple[Sequence, SampledToken]],
    executed: ExecutedStep,
) -> None:
    """Keep the tokens that would be sampled without drafts.

    `sampled`: of each sequence the token after its last known token, then those after its drafted tokens. The
    token after a draft is kept if the draft equals the token sampled in its place, and all before it do.
    """
    rows: dict[Sequence, list[SampledToken]] = {}
    for sequence, token in sampled:
        rows.setdefault(sequence, []).append(token)
    for sequence, (first, *others) in rows.items():
        executed.tokens[sequence] = previous = first
        for draft, token in zip(drafts.get(sequence, ()), others, strict=True):
            if previous.token_id != draft:
                break
            executed.accepted.setdefault(sequence, []).append(token)
            previous = token
