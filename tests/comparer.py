"""Compares greedy tokens with those that `transformers` generates.

float32 logits move by about 1e-4 with the number of rows in a batch. So if tokens differ at a position where
the reference's two largest logits are closer than `NEAR_TIE`, the comparison of that request ends there as a
near tie. At most `max(1, 1 %)` of requests may be near ties. Any other difference, also in length, is a
mismatch.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel

K = TypeVar("K", bound=Hashable)
NEAR_TIE = 1e-3
# No token has this id. Without it, `generate` would stop at the model's own end tokens.
_NO_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Reference:
    """Greedy tokens of one prompt; `gaps[i]` is the lead, in logits, of token i over the next likely one."""

    token_ids: list[int]
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing several requests; each text names the request and the position."""

    num_requests: int
    near_ties: tuple[str, ...]
    mismatches: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        return not self.mismatches and len(self.near_ties) <= max(1, self.num_requests // 100)


def reference(
    model: PreTrainedModel,
    prompt_token_ids: list[int],
    max_tokens: int,
    eos_token_ids: Iterable[int] = (),
) -> Reference:
    """The tokens of `model.generate` for a single request.

    Load the model with `attn_implementation="eager"` and in float32. An end of text is part of the tokens,
    and the last of them.
    """
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=[_NO_TOKEN, *eos_token_ids],
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    prompt = torch.tensor([prompt_token_ids], device=model.device)
    model_like: Any = model
    with torch.inference_mode():
        generated = model_like.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=config
        )
    token_ids = generated.sequences[0, len(prompt_token_ids) :].tolist()
    leads = [row[0].float().topk(2).values for row in generated.logits]
    return Reference(token_ids, [float(largest - second) for largest, second in leads])


def compare(found: Mapping[K, list[int]], expected: Mapping[K, Reference]) -> Comparison:
    """Compare `found` with `expected`, whose requests it must contain."""
    near_ties: list[str] = []
    mismatches: list[str] = []
    for request, right in expected.items():
        position = _first_difference(found.get(request, []), right.token_ids)
        if position is None:
            continue
        gap = right.gaps[position] if position < len(right.gaps) else float("inf")
        label = f"{request}: token {position} of {len(right.token_ids)}, lead {gap:.2g}"
        (near_ties if gap < NEAR_TIE else mismatches).append(label)
    return Comparison(len(expected), tuple(near_ties), tuple(mismatches))


def assert_equal_tokens(found: Mapping[K, list[int]], expected: Mapping[K, Reference]) -> None:
    """Fail with the positions of differing tokens, unless they are a few near ties."""
    comparison = compare(found, expected)
    assert comparison.agrees, (
        f"of {comparison.num_requests} requests, mismatches: {comparison.mismatches},"
        f" near ties: {comparison.near_ties}"
    )


def _first_difference(found: list[int], right: list[int]) -> int | None:
    for position, (ours, theirs) in enumerate(zip(found, right, strict=False)):
        if ours != theirs:
            return position
    return None if len(found) == len(right) else min(len(found), len(right))
