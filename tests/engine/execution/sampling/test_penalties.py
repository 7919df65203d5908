"""Penalties and bias, computed by hand and as their authors define them."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, RepetitionPenaltyLogitsProcessor

from engine.config import EngineConfig
from engine.execution.sampling.logits_processors import LogitsProcessors
from engine.execution.sampling.penalties import TokenCounts
from engine.outputs import ScheduledSequence
from engine.sampling_params import SamplingParams
from tests.engine.execution.sampling.bench import random_logits, row, sample
from tests.engine.execution.serving import make_prompts, make_runner, serve
from tests.tiny_models import make_model

A, B = 0, 1


def processed(logits: torch.Tensor, *items: ScheduledSequence) -> torch.Tensor:
    """All rows after penalties, bias and masks."""
    changed = LogitsProcessors().apply(logits, [item.sequence for item in items], range(len(items)))
    return changed.logits if changed else logits


@pytest.mark.parametrize(
    ("penalty", "tokens"),
    [
        ({"presence_penalty": 1.0}, [A, B, A]),
        ({"frequency_penalty": 0.3}, [A, A, B, A]),
        ({"repetition_penalty": 2.0}, [B, A, A]),
        ({}, [A, A, A]),
    ],
)
def test_fixed_logits_and_one_penalty(penalty: dict[str, Any], tokens: list[int]) -> None:
    """vmlx-swift#295, vllm-metal#69, Rapid-MLX#470: presence counted prompts, repetition did not.

    The prompt is A. Presence and frequency count only the output, so A comes first; repetition counts both.
    """
    logits = torch.full((1, 20), -9.0)
    logits[0, [A, B]] = torch.tensor([1.0, 0.6])
    params = SamplingParams(temperature=0.0, **penalty)
    output: list[int] = []
    for token in tokens:
        assert sample(logits, row(params, prompt=[A], output=output)) == [token]
        output.append(token)


def test_repetition_equals_that_of_transformers() -> None:
    logits = random_logits(3, 400)
    logits[0, 5] = 0.0
    token_ids = [[5, 8, 8, 300, 12], [1, 2, 3, 4, 5], [7, 7, 7, 7, 7]]
    items = [row(SamplingParams(repetition_penalty=1.3), prompt=ids[:2], output=ids[2:]) for ids in token_ids]
    right = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(token_ids), logits.clone())
    assert torch.equal(processed(logits, *items), right)


def test_a_penalized_request_equals_generation_by_transformers() -> None:
    prompts = list(make_prompts((9, 17)).values())
    config = GenerationConfig(
        do_sample=False, max_new_tokens=20, repetition_penalty=1.5, eos_token_id=2**31 - 1, pad_token_id=0
    )
    eager = make_model("llama")
    right = {
        str(at): eager.generate(input_ids=torch.tensor([prompt]), generation_config=config)[  # type: ignore[operator]  # transformers' mixin
            0, len(prompt) :
        ].tolist()
        for at, prompt in enumerate(prompts)
    }
    limits = EngineConfig(max_model_len=64, num_kv_blocks=32, block_size=4, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.5)
    requests = {str(at): (prompt, params) for at, prompt in enumerate(prompts)}
    served = serve(make_runner(make_model("llama"), limits), limits, requests)
    assert served.token_ids == right
    plain = {
        name: (prompt, SamplingParams(temperature=0.0, max_tokens=20))
        for name, (prompt, _) in requests.items()
    }
    assert serve(make_runner(make_model("llama"), limits), limits, plain).token_ids != right


def test_the_order_of_penalties_and_bias() -> None:
    """Repetition, then frequency and presence, then bias."""
    logits = torch.tensor([[4.0, -4.0, 4.0, 1.0]])
    params = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={0: 10.0, 3: -1.0}
    )
    item = row(params, prompt=[2], output=[0, 0, 1])
    assert processed(logits, item).tolist() == [[2.0 - 1.25 + 10.0, -8.0 - 0.75, 2.0, 0.0]]


def test_ids_outside_the_vocabulary_change_nothing() -> None:
    """vllm#54195: an id beyond the vocabulary wrote into the next row, and -1 into the last column."""
    logits = random_logits(3, 50)
    stray = row(
        SamplingParams(
            repetition_penalty=50.0,
            frequency_penalty=2.0,
            logit_bias={60: 90.0, 99: -90.0},
            allowed_token_ids=(3, 50, 63, 64, 149),
            min_tokens=5,
        ),
        prompt=[3, 51, 120],
        output=[52, 3, 149],
        bad_token_ids=((55,), (149, 56)),
        end_token_ids=frozenset({70, 101}),
    )
    plain = row(SamplingParams(logit_bias={1: 0.0}))
    changed = processed(logits, plain, stray, plain)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert changed[1].isfinite().nonzero()[:, 0].tolist() == [3]
    negative = row(SamplingParams(presence_penalty=2.0), output=[-1, -50])
    assert torch.equal(processed(logits, plain, negative, plain), logits)


def test_a_small_divisor_gives_no_infinity() -> None:
    logits = torch.tensor([[3e38, 1.0]])
    assert processed(logits, row(SamplingParams(repetition_penalty=1e-3), prompt=[0])).isfinite().all()
    assert sample(logits, row(SamplingParams(repetition_penalty=1e-3, top_p=0.5), prompt=[0])) == [0]


def test_the_smallest_penalty_gives_no_nan() -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -2.0]])
    assert (
        processed(logits, row(SamplingParams(repetition_penalty=1e-300), prompt=[0])).tolist()
        == logits.tolist()
    )


def test_each_new_token_is_counted_once() -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)
    sequence = row(params, prompt=[1, 2, 1]).sequence
    counts = TokenCounts(sequence, 1000)
    right = {1: 0.0, 2: 0.0}
    for step in range(300):
        sequence.append(step % 140)
        right[step % 140] = right.get(step % 140, 0.0) + 1.0
        for _ in range(step % 3):
            counts.update()
    counts.update()
    assert dict(zip(counts.token_ids.tolist(), counts.subtracted.tolist(), strict=True)) == right
    again = TokenCounts(sequence, 1000)
    assert again.token_ids.tolist() == counts.token_ids.tolist()


def test_an_update_reads_new_tokens_only() -> None:
    class Watched(list[int]):
        num_read = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]  # counts reads
            got = super().__getitem__(key)
            self.num_read += len(got) if isinstance(got, list) else 1
            return got

    sequence = row(SamplingParams(presence_penalty=1.0), output=[3] * 500).sequence
    counts = TokenCounts(sequence, 10)
    watched = sequence.token_ids = Watched(sequence.token_ids)
    sequence.append(4)
    counts.update()
    assert watched.num_read == 1
