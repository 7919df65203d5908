"""Log-probabilities of the model's own distribution, for the rows that ask for them.

Law: made of raw logits in float32, each row by itself; the likeliest come in order, equal ones by id. Knows
no penalties, no masks and no draws.
"""

import torch

from engine.execution.machine.async_copy import copy_to_device
from engine.execution.sampling.top_k import largest
from engine.outputs import TokenLogprobs

ROWS_AT_ONCE = 64
"""So that a long prompt's log-probabilities do not take as much memory again as its logits."""


def token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """For each row of `logits` [rows, vocabulary] those of its token, and of its `num_top` likeliest."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        found += _token_logprobs(logits[part].float(), token_ids[part], num_top[part])
    return found


def _token_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(-1)
    tokens = copy_to_device(torch.tensor(token_ids), logits.device)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    values, ids = likeliest(logprobs, min(max(num_top), logits.shape[1]))
    return [
        TokenLogprobs(token_id, logprob, tuple(zip(top_ids[:number], top[:number], strict=True)))
        for token_id, logprob, top_ids, top, number in zip(
            token_ids, own, ids.tolist(), values.tolist(), num_top, strict=True
        )
    ]


def likeliest(logprobs: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest values [rows, number] of each row in descending order, and their ids; equal ones by id."""
    vocab_size = logprobs.shape[1]
    if not number:
        return logprobs[:, :0], torch.empty_like(logprobs[:, :0], dtype=torch.int64)
    # One more than asked for shows whether a value beyond the last equals it.
    values, ids = largest(logprobs, min(number + 1, vocab_size))
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
    """The first `number` of each row by descending value, then by id."""
    # Floats in the order of integers: those below zero are turned round. Adding zero makes -0 be 0.
    bits = (values + 0.0).view(torch.int32)
    ranks = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    order = ((ranks << 32) - ids).topk(number).indices
    return values.gather(1, order), ids.gather(1, order)
