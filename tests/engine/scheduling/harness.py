"""A scheduler that is stepped without a device: every row that samples draws token 7."""

from engine.config import EngineConfig
from engine.outputs import SampledToken, SchedulerOutputs
from engine.requests.stop_rules import StopRules
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence
from tests.engine.fakes import Clock


class Bench:
    """A scheduler, its clock, and requests that are named for the order in which they came.

    Limits are small; a step takes `seconds` on the clock. Sequences end by their `max_tokens`.
    """

    def __init__(self, *, seconds: float = 0.0, **limits: object) -> None:
        small = {"max_model_len": 48, "num_kv_blocks": 16, "block_size": 4, "prefix_caching": False}
        self.config = EngineConfig(**{**small, **limits})  # type: ignore[arg-type]  # tests pass what they may
        self.clock = Clock()
        self.scheduler = Scheduler(self.config, clock=self.clock)
        self.num_steps = 0
        self._seconds = seconds
        self._stop_rules = StopRules(self.config)
        self._num_requests = 0

    def add(self, prompt: int | list[int] = 4, max_tokens: int = 8, **fields: object) -> Sequence:
        number = self._num_requests
        self._num_requests += 1
        prompt = [number, *range(1, prompt)] if isinstance(prompt, int) else prompt
        params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
        held = fields.pop("held", None)
        fields.setdefault("arrival_time", float(number))
        sequence = Sequence(f"r{number}", prompt, params, **fields)  # type: ignore[arg-type]
        self.scheduler.add_sequence(sequence, held)  # type: ignore[arg-type]
        return sequence

    def step(self, *only: Sequence) -> SchedulerOutputs:
        """With `only`: of these alone."""
        self.num_steps += 1
        self.clock.now += self._seconds
        outputs = self.scheduler.schedule(only or None)
        tokens = {item.sequence: SampledToken(7) for item in outputs.scheduled if item.samples}
        ends = {one: self._stop_rules.reason(one, 7) for one in tokens}
        self.scheduler.update(outputs, tokens, {one: reason for one, reason in ends.items() if reason})
        return outputs

    def steps_until(self, sequence: Sequence, *, at_most: int) -> int:
        """How many steps it takes until `sequence` is first scheduled."""
        for number in range(1, at_most + 1):
            if sequence in {item.sequence for item in self.step().scheduled}:
                return number
        raise AssertionError(f"{sequence.request_id} was not scheduled in {at_most} steps")

    def run_out(self, *, at_most: int = 2000) -> None:
        """Step until nothing is left; nothing leaks."""
        for _ in range(at_most):
            if not self.scheduler.has_unfinished_sequences():
                break
            self.step()
        assert not self.scheduler.has_unfinished_sequences(), "work that never ends"
        assert self.scheduler.block_manager.num_free_blocks == self.config.num_kv_blocks

    def end(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.abort(sequence, FinishReason.CANCELLED)


def names(outputs: SchedulerOutputs) -> list[str]:
    return [item.sequence.request_id for item in outputs.scheduled]


def shares(outputs: SchedulerOutputs) -> dict[str, int]:
    """The tokens of each in a step."""
    return {item.sequence.request_id: item.num_new_tokens for item in outputs.scheduled}
