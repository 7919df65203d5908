"""Launches whole steps, forward pass and draw, without waiting for the device.

The tokens are those that `ModelRunner` and `Sampler` compute step by step.
"""

from typing import Protocol

import torch

from engine.execution.machine.async_copy import SampledIds
from engine.execution.sampling.logits_processors import is_processed
from engine.execution.sampling.sampler import Sampler
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs


class AsyncRunner(Protocol):
    """A runner that accepts tokens which are only on the device. See `ModelRunner`."""

    def execute(self, outputs: SchedulerOutputs, drawn: torch.Tensor | None = None) -> torch.Tensor: ...

    def check(self) -> None: ...

    def release_memory(self) -> bool: ...


class DeviceExecutor:
    """See `engine.steps.pipeline.AsyncExecutor`. `device`: where the logits are."""

    def __init__(self, runner: AsyncRunner, sampler: Sampler, device: torch.device) -> None:
        self._runner = runner
        self._sampler = sampler
        # With top-k or top-p, the host must check that a row's window holds all tokens that are kept.
        self._draws_filtered = device.type == "cpu"

    def can_launch(self, item: ScheduledSequence) -> bool:
        """Whether the item can be launched: its draw needs neither the output's tokens, masks nor logprobs.

        On a GPU, top-k and top-p need the host as well.
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
            and not is_processed(item.sequence)
        )

    def launch(self, outputs: SchedulerOutputs, after: SampledIds | None) -> SampledIds:
        """Raises `DeviceLost`; any other exception, such as `MemoryError`, passes."""
        logits = self._runner.execute(outputs, None if after is None else after.tokens)
        return self._sampler.draw(logits, outputs.scheduled)

    def fetch(self, launched: SampledIds) -> list[SampledToken]:
        """Raises `DeviceLost`."""
        return self._sampler.fetch(launched)
