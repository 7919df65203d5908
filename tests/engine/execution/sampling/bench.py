"""Rows for the sampler, and a naive reference implementation."""

import itertools
import math
from typing import Any

import numpy as np
import torch

from engine.constraints import NO_TOKEN_ALLOWED, Constraints
from engine.execution.sampling.gumbel import gumbel_noise, row_keys, seed_states
from engine.execution.sampling.sampler import NON_FINITE, Sampler
from engine.outputs import SampledToken, ScheduledSequence, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

CPU = torch.device("cpu")
_slots = itertools.count()


class ModuloGrammar:
    """After outputs with sum s, allows tokens equal to s modulo `divisor`, and `end` if that is 0."""

    is_complete = False

    def __init__(self, divisor: int, end: int = 0, fault: Exception | None = None) -> None:
        self._divisor = divisor
        self._end = end
        self._fault = fault
        self._sum = 0

    def advance(self, token_ids: list[int]) -> None:
        if self._fault:
            raise self._fault
        self._sum = sum(token_ids)

    def allows(self, token_id: int) -> bool:
        rest = self._sum % self._divisor
        return token_id % self._divisor == rest or (token_id == self._end and rest == 0)

    def fill_bitmask(self, row: Any) -> None:
        for token_id in range(32 * len(row)):
            if self.allows(token_id):
                row.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


class SetGrammar(ModuloGrammar):
    """Allows the same tokens at every step."""

    def __init__(self, *token_ids: int) -> None:
        super().__init__(1)
        self._token_ids = token_ids

    def allows(self, token_id: int) -> bool:
        return token_id in self._token_ids


def row(
    params: SamplingParams,
    index: int = 0,
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    **constraints: Any,
) -> ScheduledSequence:
    """An item of one row whose request has `output` tokens so far, or `index` of them."""
    sequence = Sequence(
        "r",
        prompt or [1],
        params,
        arrival_time=0.0,
        constraints=Constraints(**constraints),
    )
    sequence.token_ids += [1] * index if output is None else output
    sequence.admit(next(_slots))
    return ScheduledSequence(sequence, sequence.num_tokens - 1, 1, 0, True)


def keys_of(*draws: tuple[int, int]) -> torch.Tensor:
    """The keys of (seed, output index)."""
    return row_keys(seed_states([seed for seed, _ in draws]), [index for _, index in draws], CPU)


def sample(logits: torch.Tensor, *items: ScheduledSequence) -> list[int | None]:
    return [token.token_id for token in Sampler().sample(logits, items)]


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def naive_kept(logits: list[float], params: SamplingParams) -> set[int]:
    """The tokens that the filters keep, in Python floats."""
    scaled = [(value - max(logits)) / params.temperature for value in logits]
    kept = set(range(len(logits)))
    if 0 < params.top_k < len(logits):
        kth = sorted(scaled, reverse=True)[params.top_k - 1]
        kept = {token for token in kept if scaled[token] >= kth}
    if params.top_p < 1:
        kept = nucleus({token: scaled[token] for token in kept}, params.top_p)
    return {token for token in kept if math.exp(scaled[token]) >= params.min_p}


def nucleus(scaled: dict[int, float], top_p: float) -> set[int]:
    """The tokens preceded by less than `top_p` of all mass; equal values are kept together."""
    limit = top_p * math.fsum(map(math.exp, scaled.values()))
    nucleus: set[int] = set()
    before = 0.0
    for value, equals in itertools.groupby(
        sorted(scaled, key=scaled.__getitem__, reverse=True), scaled.__getitem__
    ):
        if before >= limit:
            break
        tokens = list(equals)
        nucleus.update(tokens)
        before += len(tokens) * math.exp(value)
    return nucleus


def naive_draw(logits: torch.Tensor, params: SamplingParams, index: int) -> int:
    values = logits.tolist()
    kept = naive_kept(values, params)
    token_ids = torch.arange(len(values), dtype=torch.int32)
    noise = gumbel_noise(keys_of((params.seed, index)), token_ids)[0]
    scaled = (logits - logits.max()) / torch.tensor(params.temperature)
    noisy = (scaled + noise).tolist()
    return max(kept, key=noisy.__getitem__)


def naive_processed(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Penalties, bias and masks, token by token, in single precision."""
    params, output = sequence.params, sequence.output_token_ids
    processed = logits.clone().numpy()
    for token, value in enumerate(processed):
        if token in sequence.token_ids:
            repetition = np.float32(params.repetition_penalty)
            value = value / repetition if value > 0 else value * repetition
        if token in output:
            taken = params.frequency_penalty * output.count(token) + params.presence_penalty
            value = value - np.float32(taken)
        value = value + np.float32(params.logit_bias.get(token, 0.0))
        processed[token] = value if naive_allowed(sequence, token) else -np.inf
    processed = np.where(naive_ends(sequence, processed), -np.inf, processed).astype(np.float32)
    return torch.from_numpy(processed)


def naive_allowed(sequence: Sequence, token: int) -> bool:
    """By all masks except `min_tokens`."""
    params, constraints = sequence.params, sequence.constraints
    with_it = [*sequence.output_token_ids, token]
    if any(with_it[-len(bad) :] == list(bad) for bad in constraints.bad_token_ids):
        return False
    if constraints.grammar is not None:
        constraints.grammar.advance(sequence.output_token_ids)
        if not constraints.grammar.allows(token):  # type: ignore[attr-defined]  # a grammar of this file
            return False
    return params.allowed_token_ids is None or token in params.allowed_token_ids


def naive_ends(sequence: Sequence, processed: "np.ndarray[Any, Any]") -> list[bool]:
    """The end tokens that `min_tokens` forbids: none if a grammar allows nothing else."""
    ends = [token in sequence.constraints.end_token_ids for token in range(len(processed))]
    is_too_short = sequence.num_output_tokens < sequence.params.min_tokens
    others = [token for token, is_end in enumerate(ends) if not is_end and naive_allowed(sequence, token)]
    if not is_too_short or (sequence.constraints.grammar is not None and not others):
        return [False] * len(processed)
    return ends


def naive_logprobs(logits: torch.Tensor, token_id: int, number: int) -> TokenLogprobs:
    logprobs = logits.float().log_softmax(-1).tolist()
    order = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))
    return TokenLogprobs(
        token_id, logprobs[token_id], tuple((token, logprobs[token]) for token in order[:number])
    )


def naive_sample(logits: torch.Tensor, item: ScheduledSequence) -> SampledToken:
    """The whole pipeline for one row."""
    sequence, params = item.sequence, item.sequence.params
    if not logits.max().isfinite():
        return SampledToken(None, NON_FINITE)
    processed = naive_processed(logits.float(), sequence)
    if processed.max() == -torch.inf:
        return SampledToken(None, NO_TOKEN_ALLOWED)
    if params.is_greedy:
        token_id = int(processed.argmax())
    else:
        token_id = naive_draw(processed, params, sequence.num_output_tokens)
    if params.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, None, naive_logprobs(logits, token_id, params.logprobs))
