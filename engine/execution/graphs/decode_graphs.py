"""Decode steps as device graphs: captured once for a few numbers of rows, replayed for all others.

Law: a replay gives what the forward pass gives, in a tensor that is the caller's own; rows that fill a step
up are nobody's, and no row sees them. A step that is anything but single tokens is not taken. What cannot be
captured, or gives other logits when it is replayed, is not used at all, and a warning says why.

This file does not know what a graph is: `Capture` makes one of work for a device.
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
from engine.execution.runner.forward import run_model
from engine.execution.runner.inputs import StepInputs

log = logging.getLogger(__name__)

SMALL_SIZES = (1, 2, 4)
LEAST_STEP = 8
SIZES_PER_DOUBLING = 8
"""Where that is more than `LEAST_STEP`: at most an eighth of the rows are nobody's."""


class Graph(Protocol):
    """Work of a device that was recorded once."""

    def replay(self) -> None:
        """Launch the same work again, on the same memory."""
        ...


class Capture(Protocol):
    """Makes graphs."""

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        """Which of `sizes`, numbers of rows in ascending order, to capture, and in which order. The next one
        is asked for when the one before has been captured.
        """
        ...

    def __call__(self, work: Callable[[], None]) -> Graph:
        """Record what the given work launches; it may be run several times for that."""
        ...


class DecodeGraphs:
    """Graphs by their number of rows, which read `buffers` and write `logits` [rows, vocabulary]."""

    def __init__(self, buffers: DecodeBuffers, logits: torch.Tensor, graphs: Mapping[int, Graph]) -> None:
        self._buffers = buffers
        self._logits = logits
        self._graphs = graphs
        self.sizes = tuple(sorted(graphs))
        """Rows that a graph has, ascending."""

    def takes(self, inputs: StepInputs) -> bool:
        """Whether the step is single tokens, and not more than the largest graph has."""
        return not inputs.batch.chunks and 0 < len(inputs.token_ids) <= self.sizes[-1]

    def replay(self, inputs: StepInputs) -> torch.Tensor:
        """As `ModelRunner.forward`, for a step that `takes` says yes to."""
        count = len(inputs.token_ids)
        size = self.sizes[bisect_left(self.sizes, count)]
        self._buffers.write(inputs, size)
        self._graphs[size].replay()
        wanted = inputs.logits_rows
        # A copy either way: the next replay writes its logits into the same place.
        if len(wanted) == count:
            return self._logits[:count].clone()
        return self._logits[copy_to_device(wanted, self._logits.device)]


def graph_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows from 1 to `most`: 1, 2, 4, 8, 16, 24 and so on, at last in steps of an eighth."""
    sizes = [size for size in SMALL_SIZES if size < most]
    size = LEAST_STEP
    while size < most:
        sizes.append(size)
        power = 1 << (size.bit_length() - 1)
        size += max(LEAST_STEP, power // SIZES_PER_DOUBLING)
    return (*sizes, most)


def make_decode_graphs(
    model: PreTrainedModel,
    backend: GraphableBackend,
    config: EngineConfig,
    capture: Capture,
    progress: Callable[[str], None],
) -> DecodeGraphs | None:
    """Graphs for all numbers of sequences that `config` allows; None, with a warning, where there are none.

    The pool must be empty: the trial of each graph uses some of its blocks, and leaves them zeroed.
    """
    free = free_bytes(model.device)
    try:
        with torch.inference_mode():
            graphs = _capture_all(model, backend, config, capture, progress)
    except Exception as error:  # noqa: BLE001 - models, kernels and drivers raise what they like
        log.warning("decode steps run without graphs: %s: %s", type(error).__name__, error)
        return None
    taken = max(0, free - free_bytes(model.device)) >> 20
    progress(f"decode graphs: {len(graphs.sizes)}, of 1 to {graphs.sizes[-1]} rows, {taken} MiB")
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
    trial = GraphSelfCheck(model, backend, config, sizes[-1])
    logits = trial.logits.new_empty(sizes[-1], trial.logits.shape[-1])
    made: dict[int, Graph] = {}
    for size in capture.order(sizes):
        progress(f"capturing a decode graph of {size} rows")
        # What the trial of the one before wrote there would be computed again, into blocks that are clean.
        buffers.clear()
        made[size] = capture(partial(_decode, model, backend, buffers.first(size), logits[:size]))
        trial.check(DecodeGraphs(buffers, logits, {size: made[size]}).replay, size)
    return DecodeGraphs(buffers, logits, made)


def _decode(
    model: PreTrainedModel, backend: GraphableBackend, inputs: DecodeInputs, logits: torch.Tensor
) -> None:
    """What is captured. All graphs write to one place, so that none keeps logits in the memory they share."""
    step = backend.build_decode_metadata(inputs.rows)
    logits.copy_(run_model(model, inputs.token_ids, inputs.positions, inputs.all_rows, step))
