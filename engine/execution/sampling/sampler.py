"""Chooses the next token of each row: logits processors, then argmax or a random draw.

A row's token is a pure function of its logits and of its sequence's tokens and parameters. It does not depend
on the batch or on a generator state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from engine.constraints import NO_TOKEN_ALLOWED
from engine.execution.machine.async_copy import SampledIds, copy_to_device
from engine.execution.machine.device_errors import device_errors
from engine.execution.sampling.draw import Draws, draw, select_rows
from engine.execution.sampling.logits_processors import LogitsProcessors, ProcessedLogits
from engine.execution.sampling.logprobs import token_logprobs
from engine.execution.sampling.native_draw import UNDECIDED, DrawOperator, draw_requests, row_addresses
from engine.execution.sampling.slot_params import NO_LOGPROBS, Integers, Params, SlotParams
from engine.execution.sampling.top_k import row_max
from engine.outputs import SampledToken, ScheduledSequence, TokenLogprobs

NON_FINITE = "the model computed non-finite logits"
ROWS_AT_ONCE = 32
"""On a CPU, rows that are sampled together. Their intermediate values fit the cache."""
_ERRORS = {-1: NON_FINITE, -2: NO_TOKEN_ALLOWED}


class Sampler:
    """Samples whole batches. `operator`: draws if the logits are on a CPU; None: torch draws."""

    def __init__(self, operator: DrawOperator | None = None) -> None:
        self._operator = operator
        self._params = SlotParams()
        self._processors = LogitsProcessors()

    def sample(self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        """One token for each item that samples, in order. `logits` are not changed.

        `logits` [wanted rows of all items, vocabulary], any float dtype. A row gives an error instead of a
        token if it has NaN or +inf, or only -inf, if its masks allow no token, or if its grammar fails.
        Raises `DeviceLost`.
        """
        with device_errors(), torch.inference_mode():
            self._processors.evict()
            sampled: list[SampledToken] = []
            for part, rows, params in self._parts(logits, items):
                sampled += self._sample(part, rows, params)
        return sampled

    def draw(self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]) -> SampledIds:
        """As `sample`, without waiting, for items without logits processors and log-probabilities."""
        with device_errors(), torch.inference_mode():
            tokens = [
                self._choose(part, None, rows, params) for part, rows, params in self._parts(logits, items)
            ]
            nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
            return SampledIds.of(tokens[0] if len(tokens) == 1 else torch.cat([nothing, *tokens]))

    def fetch(self, drawn: SampledIds) -> list[SampledToken]:
        """Wait for drawn tokens; returns what `sample` does. Raises `DeviceLost`."""
        with device_errors():
            return [
                SampledToken(token_id) if token_id >= 0 else SampledToken(None, _ERRORS[token_id])
                for token_id in drawn.on_host()
            ]

    def _parts(
        self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]
    ) -> Iterator[tuple[torch.Tensor, list[ScheduledSequence], Params]]:
        """The rows to sample from, float32, with their items and parameters, in parts."""
        rows, sampling = _sampling_rows(items)
        if len(rows) < len(logits):
            logits = logits[copy_to_device(torch.tensor(rows, dtype=torch.int64), logits.device)]
        params = self._params.of([item.sequence for item in sampling])
        step = ROWS_AT_ONCE if logits.device.type == "cpu" else max(len(rows), 1)
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            yield logits[part].float().contiguous(), sampling[part], params[part]

    def _sample(
        self, logits: torch.Tensor, items: list[ScheduledSequence], params: Params
    ) -> list[SampledToken]:
        candidates = np.flatnonzero(params["may_be_processed"]).tolist()
        processed = self._processors.apply(logits, [item.sequence for item in items], candidates)
        token_ids = self._choose(logits, processed, items, params).tolist()
        logprobs = _sampled_logprobs(logits, token_ids, params)
        faults = processed.faults if processed else {}
        if not faults and not logprobs and min(token_ids) >= 0:
            return list(map(SampledToken, token_ids))
        return [
            SampledToken(token_id, None, logprobs.get(row))
            if token_id >= 0 and row not in faults
            else SampledToken(None, faults.get(row) or _ERRORS[token_id])
            for row, token_id in enumerate(token_ids)
        ]

    def _choose(
        self,
        logits: torch.Tensor,
        processed: ProcessedLogits | None,
        items: list[ScheduledSequence],
        params: Params,
    ) -> torch.Tensor:
        """The token of each row, or its key in `_ERRORS`, on the device of the logits."""
        operator = self._operator if logits.device.type == "cpu" else None
        find_max = operator.row_max if operator else row_max
        max_logits, tokens = find_max(logits)
        # Checked before masks, whose -inf is no error. The maximum of a row with NaN is NaN.
        is_finite = max_logits.isfinite()
        if processed:
            max_logits[processed.rows], tokens[processed.rows] = find_max(processed.logits)
        random = np.flatnonzero(params["is_random"])
        if len(random):
            indices = np.array([items[row].output_index for row in random], dtype=np.int64)
            batch = _Batch(logits, processed, max_logits, tokens, params)
            undecided = batch.draw_natively(operator, random, indices) if operator else np.arange(len(random))
            if len(undecided):
                batch.draw(random[undecided], indices[undecided])
        return tokens.masked_fill_(max_logits == -torch.inf, -2).masked_fill_(~is_finite, -1)

    def prompt_logprobs(
        self, logits: torch.Tensor, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        """Log-probabilities of prompt tokens, for the items that request them.

        `logits` as in `sample`. Row j of a chunk gives token `start + j + 1`, if that is in the prompt.
        Raises `DeviceLost`.
        """
        found: list[tuple[ScheduledSequence, list[TokenLogprobs]]] = []
        end = 0
        with device_errors(), torch.inference_mode():
            for item in items:
                begin, end = end, end + item.num_new_tokens - item.logits_from
                number = item.sequence.params.prompt_logprobs
                first = item.start + item.logits_from + 1
                last = min(first + end - begin, item.sequence.num_prompt_tokens)
                if number is not None and first < last:
                    token_ids = item.sequence.token_ids[first:last]
                    rows = logits[begin : begin + len(token_ids)]
                    found.append((item, token_logprobs(rows, token_ids, [number] * len(token_ids))))
        return found


def _sampling_rows(items: tuple[ScheduledSequence, ...]) -> tuple[list[int], list[ScheduledSequence]]:
    """The items that sample, with the last wanted row of each."""
    rows: list[int] = []
    sampling: list[ScheduledSequence] = []
    end = 0
    for item in items:
        end += item.num_new_tokens - item.logits_from
        if item.samples:
            rows.append(end - 1)
            sampling.append(item)
    return rows, sampling


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of logits, where `processed` replaces some, and their maxima. A draw writes into `tokens`."""

    logits: torch.Tensor
    processed: ProcessedLogits | None
    max_logits: torch.Tensor
    tokens: torch.Tensor
    params: Params

    def draw_natively(self, operator: DrawOperator, rows: Integers, indices: Integers) -> Integers:
        """Draw `rows`, whose outputs have `indices` tokens; returns which of `rows` are undecided."""
        addresses = row_addresses(self.logits)
        if self.processed:
            addresses[self.processed.host_rows] = row_addresses(self.processed.logits)
        max_logits, argmax = self.max_logits.numpy()[rows], self.tokens.numpy()[rows]
        vocab_size = self.logits.shape[1]
        requests = draw_requests(addresses[rows], max_logits, argmax, self.params[rows], indices, vocab_size)
        drawn = operator.draw(requests, vocab_size)
        self.tokens.numpy()[rows] = drawn
        return np.flatnonzero(drawn == UNDECIDED)

    def draw(self, rows: Integers, indices: Integers) -> None:
        """Draw `rows` with torch, on any device."""
        device = self.logits.device
        draws = Draws.of(self.params[rows], indices, self.logits.shape[1], device)
        on_device = copy_to_device(torch.from_numpy(rows), device)
        self.tokens[on_device] = draw(self._shifted(on_device).div_(draws.temperature[:, None]), draws)

    def _shifted(self, rows: torch.Tensor) -> torch.Tensor:
        """The processed logits of `rows`, ascending, in a new tensor, with each row's largest at 0.

        Shifting before the division by temperature avoids overflow.
        """
        logits, processed = self.logits, self.processed
        if processed and len(processed.rows) == len(logits):
            logits = processed.logits
        elif processed:
            logits = logits.index_copy(0, processed.rows, processed.logits)
        return select_rows(logits, rows) - self.max_logits[rows, None]


def _sampled_logprobs(logits: torch.Tensor, token_ids: list[int], params: Params) -> dict[int, TokenLogprobs]:
    """By row, for rows that request them and have a token."""
    rows = np.flatnonzero((params["num_logprobs"] != NO_LOGPROBS) & (np.array(token_ids) >= 0))
    if not len(rows):
        return {}
    selected = select_rows(logits, copy_to_device(torch.from_numpy(rows), logits.device))
    host_rows = rows.tolist()
    chosen = [token_ids[row] for row in host_rows]
    logprobs = token_logprobs(selected, chosen, params["num_logprobs"][rows].tolist())
    return dict(zip(host_rows, logprobs, strict=True))
