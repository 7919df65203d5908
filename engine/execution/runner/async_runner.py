"""Gives a device a whole step to do, forward pass and draw, without waiting for it.

Law: the tokens are those that `ModelRunner` and `Sampler` give step by step. What needs the host half-way is
not taken. This file does not know why a step is launched early.
"""

from typing import Protocol

import torch

from engine.execution.machine.async_copy import SampledIds
from engine.execution.sampling.logits_processors import is_edited
from engine.execution.sampling.sampler import Sampler
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs


class AsyncRunner(Protocol):
    """A runner that takes tokens which are on the device only."""

    def execute(self, outputs: SchedulerOutputs, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """See `ModelRunner.execute`."""
        ...

    def check(self) -> None:
        """See `ModelRunner.check`."""
        ...

    def release_memory(self) -> bool:
        """See `ModelRunner.release_memory`."""
        ...


class DeviceExecutor:
    """See `engine.steps.pipeline.AsyncExecutor`. `device`: where the logits are."""

    def __init__(self, runner: AsyncRunner, sampler: Sampler, device: torch.device) -> None:
        self._runner = runner
        self._sampler = sampler
        # Whether a row's window holds all that its filters keep is asked on the host.
        self._draws_filtered = device.type == "cpu"

    def takes(self, item: ScheduledSequence) -> bool:
        """Not what looks at an output's own tokens, is masked, or gives log-probabilities.

        A GPU does not draw among the likeliest without the host either.
        """
        params = item.sequence.params
        if params.prompt_logprobs is not None:
            return False
        if not item.samples:
            return True
        is_filtered = params.top_k > 0 or params.top_p < 1
        return (
            params.logprobs is None
            and (self._draws_filtered or not is_filtered)
            and not is_edited(item.sequence)
        )

    def launch(self, outputs: SchedulerOutputs, after: SampledIds | None) -> SampledIds:
        """Raises `DeviceLost`; any other exception, out of memory too, as it comes."""
        logits = self._runner.execute(outputs, None if after is None else after.tokens)
        return self._sampler.draw(logits, outputs.scheduled)

    def fetch(self, launched: SampledIds) -> list[SampledToken]:
        """Raises `DeviceLost`."""
        return self._sampler.fetch(launched)
