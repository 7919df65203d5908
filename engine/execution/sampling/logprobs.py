"""Log-probabilities of the model's own distribution: from raw logits in float32, for each row by itself."""

import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.execution.sampling.top_k import top_k
from engine.outputs import TokenLogprobs

ROWS_AT_ONCE = 64
"""Bounds the memory for the log-probabilities of a long prompt."""


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [rows, vocabulary], those of its token and of its `num_top` likeliest."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        found += _token_logprobs(logits[part].float(), token_ids[part], num_top[part])
    return found


def _token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(-1)
    tokens = copy_to_device(torch.tensor(token_ids), logits.device)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    values, ids = most_likely(logprobs, min(max(num_top), logits.shape[1]))
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(top_ids[:number], top[:number], strict=True)))
        for token_id, logprob, top_ids, top, number in zip(
            token_ids, own, ids.tolist(), values.tolist(), num_top, strict=True
        )
    ]


def most_likely(logprobs: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values [rows, number] in descending order and their ids; ties by id."""
    vocab_size = logprobs.shape[1]
    if not number:
        return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
    # One more value shows whether the last one is tied.
    values, ids = top_k(logprobs, min(number + 1, vocab_size))
    if number < vocab_size:
        tied = (~(values[:, number - 1] > values[:, number])).nonzero()[:, 0]
        values, ids = _in_order(values, ids, number)
        if len(tied):
            whole = logprobs[tied]
            all_ids = torch.arange(vocab_size, device=logprobs.device).expand_as(whole)
            values[tied], ids[tied] = _in_order(whole, all_ids, number)
        return values, ids
    return _in_order(values, ids, number)


def _in_order(values: torch.Tensor, ids: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `number` of each row by descending value, ties by id."""
    # Maps floats to integers of the same order. Adding zero turns -0 into 0.
    bits = (values + 0.0).view(torch.int32)
    ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    order = ((ranks << 32) - ids).topk(number).indices
    return values.gather(1, order), ids.gather(1, order)
