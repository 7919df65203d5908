"""A scheduler that is stepped without a device: every row that samples returns token 7."""

from typing import Any

from engine.config import EngineConfig
from engine.outputs import SampledToken, SchedulerOutputs, WaitingReason
from engine.requests.stop_rules import StopRules
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence
from tests.engine.fakes import Clock


class Bench:
    """A scheduler, its clock, and requests named r0, r1, ... in order of arrival.

    Limits are small; a step takes `seconds` on the clock. Sequences end by their `max_tokens`.
    """

    def __init__(self, *, seconds: float = 0.0, **limits: Any) -> None:
        small = {"max_model_len": 48, "num_kv_blocks": 16, "block_size": 4, "prefix_caching": False}
        self.config = EngineConfig(**{**small, **limits})
        self.clock = Clock()
        self.scheduler = Scheduler(self.config, clock=self.clock)
        self.num_steps = 0
        self._seconds = seconds
        self._stop_rules = StopRules(self.config)
        self._num_requests = 0

    def add(
        self,
        prompt: int | list[int] = 4,
        max_tokens: int = 8,
        *,
        params: SamplingParams | None = None,
        deferred: WaitingReason | None = None,
        **fields: Any,
    ) -> Sequence:
        """`prompt`: token ids, or a length. `fields`: of `Sequence`."""
        number = self._num_requests
        self._num_requests += 1
        prompt = [number, *range(1, prompt)] if isinstance(prompt, int) else prompt
        fields.setdefault("arrival_time", float(number))
        sequence = Sequence(f"r{number}", prompt, params or SamplingParams(max_tokens=max_tokens), **fields)
        self.scheduler.add_sequence(sequence, deferred)
        return sequence

    def step(self, *isolated: Sequence) -> SchedulerOutputs:
        """One step; with arguments, an isolated one."""
        self.num_steps += 1
        self.clock.now += self._seconds
        outputs = self.scheduler.schedule_isolated(isolated) if isolated else self.scheduler.schedule()
        tokens = {item.sequence: SampledToken(7) for item in outputs.scheduled if item.samples}
        ends = {one: self._stop_rules.reason(one, 7) for one in tokens}
        self.scheduler.update(outputs, tokens, {one: reason for one, reason in ends.items() if reason})
        return outputs

    def steps_until(self, sequence: Sequence, *, at_most: int) -> int:
        """The number of steps until `sequence` is first scheduled."""
        for number in range(1, at_most + 1):
            if sequence in {item.sequence for item in self.step().scheduled}:
                return number
        raise AssertionError(f"{sequence.request_id} was not scheduled in {at_most} steps")

    def run_to_end(self, *, at_most: int = 2000) -> None:
        """Step until no work is left, and check that all blocks are free."""
        for _ in range(at_most):
            if not self.scheduler.has_unfinished_sequences():
                break
            self.step()
        assert not self.scheduler.has_unfinished_sequences(), f"unfinished after {at_most} steps"
        assert self.scheduler.block_manager.num_free_blocks == self.config.num_kv_blocks

    def cancel(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.abort(sequence, FinishReason.CANCELLED)

    def queue(self) -> list[str]:
        return [one.request_id for one in self.scheduler.waiting_queue]


def names(outputs: SchedulerOutputs) -> list[str]:
    return [item.sequence.request_id for item in outputs.scheduled]


def num_tokens(outputs: SchedulerOutputs) -> dict[str, int]:
    """The tokens of each sequence in a step."""
    return {item.sequence.request_id: item.num_new_tokens for item in outputs.scheduled}
