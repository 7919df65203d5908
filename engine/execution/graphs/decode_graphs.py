"""Captures decode steps in graphs for a few numbers of rows; a step is padded to the next of these numbers.

A replay returns the logits of a forward pass, in a new tensor. If a step cannot be captured, or a replay
returns other logits, no graphs are used and a warning states the reason. `Capture` makes the graphs of a
device.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.execution.attention.interface import GraphableBackend
from engine.execution.graphs.decode_buffers import DecodeBuffers, DecodeInputs
from engine.execution.graphs.self_check import GraphSelfCheck
from engine.execution.machine.async_copy import copy_to_device
from engine.execution.machine.memory import free_bytes
from engine.execution.runner.inputs import StepInputs
from engine.execution.runner.model_runner import run_model

log = logging.getLogger(__name__)

SMALL_SIZES = (1, 2, 4)
MINIMUM_STEP = 8
SIZES_PER_DOUBLING = 8
"""Where the steps exceed `MINIMUM_STEP`: at most an eighth of the rows is padding."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch the work again, on the same memory."""
        ...


class Capture(Protocol):
    """Makes graphs."""

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        """Which of `sizes`, ascending numbers of rows, to capture, in order.

        The next size is requested after the previous one has been captured.
        """
        ...

    def __call__(self, work: Callable[[], None]) -> Graph:
        """Capture what `work` launches. May run `work` several times."""
        ...


class DecodeGraphs:
    """Graphs by number of rows. They read `buffers` and write `logits` [rows, vocabulary]."""

    def __init__(self, buffers: DecodeBuffers, logits: torch.Tensor, graphs: Mapping[int, Graph]) -> None:
        self._buffers = buffers
        self._logits = logits
        self._graphs = graphs
        self.sizes = tuple(sorted(graphs))
        """The captured numbers of rows, ascending."""

    def supports(self, inputs: StepInputs) -> bool:
        """Whether the step has decode rows only, at most as many as the largest graph."""
        return not inputs.batch.chunks and 0 < len(inputs.token_ids) <= self.sizes[-1]

    def replay(self, inputs: StepInputs) -> torch.Tensor:
        """The logits of a step that `supports` accepts, as `ModelRunner.forward` returns them."""
        count = len(inputs.token_ids)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._buffers.write(inputs, size)
        self._graphs[size].replay()
        wanted = inputs.logits_rows
        # A copy in both cases, as the next replay overwrites the logits.
        if len(wanted) == count:
            return self._logits[:count].clone()
        return self._logits[copy_to_device(wanted, self._logits.device)]


def graph_sizes(maximum: int) -> tuple[int, ...]:
    """Numbers of rows to capture: 1, 2, 4, 8, 16, 24, ..., later in steps of an eighth, up to `maximum`."""
    sizes = [size for size in SMALL_SIZES if size < maximum]
    size = MINIMUM_STEP
    while size < maximum:
        sizes.append(size)
        power = 1 << (size.bit_length() - 1)
        size += max(MINIMUM_STEP, power // SIZES_PER_DOUBLING)
    return (*sizes, maximum)


def make_decode_graphs(
    model: PreTrainedModel,
    backend: GraphableBackend,
    config: EngineConfig,
    capture: Capture,
    progress: Callable[[str], None],
) -> DecodeGraphs | None:
    """Graphs for all numbers of sequences that `config` allows; None, with a warning, if the capture fails.

    The pool must be empty: the self-check of each graph uses some of its blocks and leaves them zeroed.
    """
    free = free_bytes(model.device)
    try:
        with torch.inference_mode():
            graphs = _capture_all(model, backend, config, capture, progress)
    except Exception as error:  # noqa: BLE001 - models, kernels and drivers raise any exception
        log.warning("decode steps run without graphs: %s: %s", type(error).__name__, error)
        return None
    used = max(0, free - free_bytes(model.device)) >> 20
    progress(f"decode graphs: {len(graphs.sizes)}, of 1 to {graphs.sizes[-1]} rows, {used} MiB")
    return graphs


def _capture_all(
    model: PreTrainedModel,
    backend: GraphableBackend,
    config: EngineConfig,
    capture: Capture,
    progress: Callable[[str], None],
) -> DecodeGraphs:
    sizes = graph_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
    table_width = -(-config.max_model_len // config.block_size)
    buffers = DecodeBuffers(sizes[-1], table_width, model.device)
    self_check = GraphSelfCheck(model, backend, config, sizes[-1])
    logits = self_check.logits.new_empty(sizes[-1], self_check.logits.shape[-1])
    graphs: dict[int, Graph] = {}
    for size in capture.order(sizes):
        progress(f"capturing a decode graph of {size} rows")
        # Otherwise the capture would compute the previous self-check again and write to its blocks.
        buffers.clear()
        graphs[size] = capture(partial(_decode, model, backend, buffers.first(size), logits[:size]))
        self_check.check(DecodeGraphs(buffers, logits, {size: graphs[size]}).replay, size)
    return DecodeGraphs(buffers, logits, graphs)


def _decode(
    model: PreTrainedModel, backend: GraphableBackend, inputs: DecodeInputs, logits: torch.Tensor
) -> None:
    """The captured work. All graphs write the same logits, so none keeps its own."""
    metadata = backend.build_decode_metadata(inputs.rows)
    logits.copy_(run_model(model, inputs.token_ids, inputs.positions, inputs.all_rows, metadata))
