"""Results of a step are reported once, even if it is executed in parts."""

import logging
import weakref

import pytest

from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.steps.fault_isolation import ExecutedStep, StepExecutor
from engine.steps.step_report import StepRecorder


class Device:
    """Its logits are the scheduled items. A request named "bad" fails in stage `fails_in`."""

    def __init__(self, fails_in: str) -> None:
        self._fails_in = fails_in
        self.num_calls = 0

    def execute(self, outputs: SchedulerOutputs) -> tuple[ScheduledSequence, ...]:
        self._fail_if_bad("execute", outputs.scheduled)
        return outputs.scheduled

    def check(self) -> None:
        pass

    def release_memory(self) -> bool:
        return False

    def sample(self, logits: object, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        assert logits == items
        self._fail_if_bad("sample", items)
        return [SampledToken(7) for item in items if item.samples]

    def prompt_logprobs(
        self, logits: object, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        self.num_calls += 1
        self._fail_if_bad("prompt_logprobs", items)
        return [
            (item, [TokenLogprobs(token, -1.0) for token in item.sequence.prompt_token_ids[1:]])
            for item in items
            if item.sequence.params.prompt_logprobs is not None
        ]

    def _fail_if_bad(self, stage: str, items: tuple[ScheduledSequence, ...]) -> None:
        if stage == self._fails_in and any(item.sequence.request_id == "bad" for item in items):
            raise ValueError("bad")


def logprobs_item(name: str, *, samples: bool = True, num_top: int | None = 0) -> ScheduledSequence:
    params = SamplingParams(prompt_logprobs=num_top)
    return ScheduledSequence(Sequence(name, [1, 2, 3], params, arrival_time=0.0), 0, 3, 0, samples)


def run(device: Device, *items: ScheduledSequence) -> ExecutedStep:
    return StepExecutor(device, device, StepRecorder(lambda: 0.0)).execute(SchedulerOutputs(prefill=items))


@pytest.mark.parametrize("fails_in", ["execute", "sample", "prompt_logprobs"])
@pytest.mark.parametrize("bad_index", range(5))
def test_prompt_logprobs_are_returned_once_when_a_step_is_bisected(fails_in: str, bad_index: int) -> None:
    good = [logprobs_item(name) for name in "abcd"]
    bad = logprobs_item("bad")
    executed = run(Device(fails_in), *good[:bad_index], bad, *good[bad_index:])
    expected = [TokenLogprobs(2, -1.0), TokenLogprobs(3, -1.0)]
    assert executed.prompt_logprobs == {item.sequence: expected for item in good}
    assert executed.tokens.pop(bad.sequence) == SampledToken(None, "ValueError: bad")
    assert executed.tokens == {item.sequence: SampledToken(7) for item in good}


def test_a_chunk_that_does_not_sample_has_prompt_logprobs() -> None:
    item = logprobs_item("a", samples=False)
    executed = run(Device("nothing"), item)
    assert executed.tokens == {}
    assert len(executed.prompt_logprobs[item.sequence]) == 2


def test_prompt_logprobs_are_not_computed_unless_requested() -> None:
    device = Device("nothing")
    run(device, logprobs_item("a", num_top=None))
    assert device.num_calls == 0


class Activation:
    """A tensor of a forward pass, which must be freed when the pass has failed."""


class StarvedDevice(Device):
    """Has memory for steps of up to `num_rows` sequences. `held`: activations alive at each attempt."""

    def __init__(self, num_rows: int, releases: list[bool] | None = None) -> None:
        super().__init__("nothing")
        self.num_rows = num_rows
        self.releases = releases or []
        self.held: list[int] = []
        self.calls: list[int] = []
        self._activations: list[weakref.ref[Activation]] = []

    def execute(self, outputs: SchedulerOutputs) -> tuple[ScheduledSequence, ...]:
        self.held.append(sum(one() is not None for one in self._activations))
        self.calls.append(len(outputs.scheduled))
        return self._layer(outputs.scheduled)

    def release_memory(self) -> bool:
        self.held.append(sum(one() is not None for one in self._activations))
        self.calls.append(0)
        return bool(self.releases) and self.releases.pop()

    def _layer(self, items: tuple[ScheduledSequence, ...]) -> tuple[ScheduledSequence, ...]:
        activation = Activation()
        self._activations.append(weakref.ref(activation))
        if len(items) > self.num_rows:
            raise MemoryError("out of memory")
        return items


class KeepsRecords(logging.Handler):
    """Keeps records, as error trackers do."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def test_a_retry_holds_no_tensors_of_failed_attempts() -> None:
    """Memory suffices for two sequences: the step is bisected twice."""
    device, handler = StarvedDevice(1), KeepsRecords()
    logger = logging.getLogger("engine.steps.fault_isolation")
    logger.addHandler(handler)
    try:
        executed = run(device, *(logprobs_item(name) for name in "abcd"))
    finally:
        logger.removeHandler(handler)
    assert len(executed.tokens) == 4
    assert device.calls == [4, 0, 2, 1, 1, 2, 1, 1]
    assert device.held == [0] * 8
    assert len(handler.records) == 3


def test_a_failed_request_holds_no_tensors_during_the_next_attempt() -> None:
    device = StarvedDevice(0)
    bad = logprobs_item("a")
    executed = run(device, bad)
    assert executed.tokens == {bad.sequence: SampledToken(None, "MemoryError: out of memory")}
    run(device, logprobs_item("b"))
    assert device.held == [0] * 4


def test_after_releasing_memory_the_whole_step_is_retried() -> None:
    device = StarvedDevice(1, releases=[True])

    def release_memory() -> bool:
        device.num_rows = 2
        return True

    device.release_memory = release_memory  # type: ignore[method-assign]
    executed = run(device, logprobs_item("a"), logprobs_item("b"))
    assert len(executed.tokens) == 2
    assert device.calls == [2, 2]


def test_memory_is_released_once_per_step() -> None:
    device = StarvedDevice(1, releases=[True])
    run(device, *(logprobs_item(name) for name in "abcd"))
    assert device.calls == [4, 0, 4, 2, 1, 1, 2, 1, 1]
