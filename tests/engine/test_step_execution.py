"""What a step gives is told once, also when it was executed in parts."""

import pytest

from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.step_execution import ExecutedStep, StepExecution
from engine.step_timer import StepTimer


class Device:
    """Its logits are the decision; a request named "bad" fails where `fails_in` says."""

    def __init__(self, fails_in: str) -> None:
        self._fails_in = fails_in
        self.num_calls = 0

    def execute(self, outputs: SchedulerOutputs) -> tuple[ScheduledSequence, ...]:
        self._meet("execute", outputs.scheduled)
        return outputs.scheduled

    def check(self) -> None:
        pass

    def sample(self, logits: object, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        assert logits == items
        self._meet("sample", items)
        return [SampledToken(7) for item in items if item.samples]

    def prompt_logprobs(
        self, logits: object, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        self.num_calls += 1
        self._meet("prompt_logprobs", items)
        return [
            (item, [TokenLogprobs(token, -1.0) for token in item.sequence.prompt_token_ids[1:]])
            for item in items
            if item.sequence.params.prompt_logprobs is not None
        ]

    def _meet(self, stage: str, items: tuple[ScheduledSequence, ...]) -> None:
        if stage == self._fails_in and any(item.sequence.request_id == "bad" for item in items):
            raise ValueError("bad")


def asking(name: str, *, samples: bool = True, number: int | None = 0) -> ScheduledSequence:
    params = SamplingParams(prompt_logprobs=number)
    return ScheduledSequence(Sequence(name, [1, 2, 3], params, arrival=0.0), 0, 3, 0, samples)


def run(device: Device, *items: ScheduledSequence) -> ExecutedStep:
    return StepExecution(device, device).run(SchedulerOutputs(prefill=items), StepTimer(lambda: 0.0))


@pytest.mark.parametrize("fails_in", ["execute", "sample", "prompt_logprobs"])
@pytest.mark.parametrize("place", range(5))
def test_rows_of_a_prompt_come_once_when_a_step_is_executed_in_halves(fails_in: str, place: int) -> None:
    good = [asking(name) for name in "abcd"]
    bad = asking("bad")
    executed = run(Device(fails_in), *good[:place], bad, *good[place:])
    told = [TokenLogprobs(2, -1.0), TokenLogprobs(3, -1.0)]
    assert executed.prompt_logprobs == {item.sequence: told for item in good}
    assert executed.tokens.pop(bad.sequence) == SampledToken(None, "ValueError: bad")
    assert executed.tokens == {item.sequence: SampledToken(7) for item in good}


def test_a_chunk_that_does_not_sample_has_prompt_logprobs_too() -> None:
    item = asking("a", samples=False)
    executed = run(Device("nothing"), item)
    assert executed.tokens == {}
    assert len(executed.prompt_logprobs[item.sequence]) == 2


def test_a_step_that_nobody_asks_of_does_not_look_for_prompt_rows() -> None:
    device = Device("nothing")
    run(device, asking("a", number=None))
    assert device.num_calls == 0
