"""Log-probabilities are the model's own, in order, and do not depend on prompt chunks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.execution.sampling import logprobs
from engine.execution.sampling.logprobs import most_likely, token_logprobs
from engine.execution.sampling.sampler import Sampler
from engine.outputs import ScheduledSequence, SchedulerOutputs, TokenLogprobs
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from engine.sequence import Sequence
from tests.engine.execution.sampling.bench import SetGrammar, naive_logprobs, random_logits, row
from tests.engine.execution.serving import in_slot, make_prompts, make_runner, part
from tests.tiny_models import make_model


@settings(max_examples=100, derandomize=True)
@given(
    rows=st.integers(1, 4),
    vocab_size=st.sampled_from([1, 2, 20, 21, 300, 12_000]),
    numbers=st.lists(st.integers(0, MAX_LOGPROBS), min_size=4, max_size=4),
    levels=st.sampled_from([None, 0.0, 0.3, 30.0]),
    seed=st.integers(0, 99),
)
def test_the_most_likely_come_in_order_and_ties_by_id(
    rows: int, vocab_size: int, numbers: list[int], levels: float | None, seed: int
) -> None:
    """sglang#32290: candidates of one text were merged; vllm#1623: more than the vocabulary was requested.

    `levels` 0: a flat row. A row does not depend on the numbers that other rows request.
    """
    logits = random_logits(rows, vocab_size, seed)
    if levels is not None:
        logits = (logits * levels).round() * -0.25
    tokens = [(seed * 7 + at) % vocab_size for at in range(rows)]
    found = token_logprobs(logits, tokens, numbers[:rows])
    assert found == list(map(naive_logprobs, logits, tokens, numbers))
    assert all(len(one.top) == min(number, vocab_size) for one, number in zip(found, numbers, strict=False))


def test_zeros_of_both_signs_are_equal() -> None:
    values = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]])
    assert most_likely(values, 3)[1].tolist() == [[1, 2, 3]]


def test_rows_that_are_not_finite_raise_nothing() -> None:
    logits = random_logits(3, 300)
    logits[1, 5:] = torch.nan
    logits[2] = -torch.inf
    found = token_logprobs(logits, [1, 2, 3], [4, 4, 4])
    assert found[0] == naive_logprobs(logits[0], 1, 4)
    assert [len(one.top) for one in found] == [4, 4, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_logprob_of_the_sampled_token_does_not_depend_on_the_draw(temperature: float) -> None:
    """vllm#4795, vllm#3707: with `logprobs=0` there were none.

    The token is not the most likely here, since masks do not change the model's distribution.
    """
    logits = random_logits(2, 500)
    params = SamplingParams(
        temperature=temperature, logprobs=0, logit_bias={7: 50.0}, repetition_penalty=3.0, seed=1
    )
    other = row(SamplingParams(temperature=temperature, seed=2, logprobs=None))
    found = Sampler().sample(logits, (row(params, grammar=SetGrammar(7, 8)), other))
    assert found[0].logprobs == TokenLogprobs(7, float(logits[0].log_softmax(-1)[7]))
    assert found[1].logprobs is None


def test_a_row_without_a_token_has_no_logprobs() -> None:
    logits = random_logits(2, 50)
    logits[0, 3] = torch.nan
    params = SamplingParams(logprobs=2)
    found = Sampler().sample(logits, (row(params), row(params, grammar=SetGrammar())))
    assert [(one.token_id, one.logprobs) for one in found] == [(None, None)] * 2


def test_logprobs_of_bfloat16_logits_are_float32() -> None:
    logits = random_logits(1, 500).bfloat16()
    (found,) = Sampler().sample(logits, (row(SamplingParams(temperature=0.0, logprobs=5)),))
    assert found.token_id is not None
    assert found.logprobs == naive_logprobs(logits[0], found.token_id, 5)


# Prompts.

CONFIG = EngineConfig(max_model_len=64, num_kv_blocks=32, block_size=4, max_num_seqs=4)
PROMPT = make_prompts((9,))["9 tokens"]
OTHER = make_prompts((14,), seed=2)["14 tokens"]


def asking(slot: int, prompt: list[int], blocks: list[int], number: int = 3) -> Sequence:
    return in_slot(slot, prompt, blocks, SamplingParams(temperature=0.0, prompt_logprobs=number))


def prompt_logprobs(*steps: SchedulerOutputs) -> dict[str, list[TokenLogprobs]]:
    """The prompt logprobs of each request, over the steps of one runner."""
    runner, sampler = make_runner(make_model("llama"), CONFIG), Sampler()
    found: dict[str, list[TokenLogprobs]] = {}
    for step in steps:
        for item, tokens in sampler.prompt_logprobs(runner.execute(step), step.scheduled):
            found.setdefault(item.sequence.request_id, []).extend(tokens)
    return found


def eager_prompt_logprobs(prompt: list[int], number: int) -> list[TokenLogprobs]:
    with torch.no_grad():
        logits = make_model("llama")(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    return [naive_logprobs(logits[at], token, number) for at, token in enumerate(prompt[1:])]


def assert_close(found: list[TokenLogprobs], right: list[TokenLogprobs]) -> None:
    assert [(one.token_id, [token for token, _ in one.top]) for one in found] == [
        (one.token_id, [token for token, _ in one.top]) for one in right
    ]
    for ours, theirs in zip(found, right, strict=True):
        assert math.isclose(ours.logprob, theirs.logprob, abs_tol=1e-4)
        for (_, value), (_, expected) in zip(ours.top, theirs.top, strict=True):
            assert math.isclose(value, expected, abs_tol=1e-4)


@pytest.mark.parametrize("cuts", [(9,), (4, 9), (1, 2, 8, 9), (3, 3 + 5, 9), tuple(range(1, 10))])
def test_a_chunked_prompt_has_the_logprobs_of_a_whole_one(cuts: tuple[int, ...]) -> None:
    """vllm#8268, vllm#3251: chunked prompts crashed or gave the wrong rows."""
    sequence = asking(0, PROMPT, [1, 2, 3])
    chunks = [part(sequence, at, end, samples=end == 9) for at, end in zip((0, *cuts), cuts, strict=False)]
    found = prompt_logprobs(*(SchedulerOutputs(prefill=(chunk,)) for chunk in chunks))
    assert_close(found["slot 0"], eager_prompt_logprobs(PROMPT, 3))


def test_prompts_in_one_batch_have_their_own_rows() -> None:
    """With a prompt of which only the last row is wanted, one without wanted rows, and a decode."""
    first, second = asking(0, PROMPT, [1, 2, 3]), asking(1, OTHER, [4, 5, 6, 7], number=1)
    last, none = in_slot(2, OTHER, [8, 9, 10, 11]), in_slot(3, PROMPT, [12, 13, 14])
    found = prompt_logprobs(
        SchedulerOutputs(prefill=(part(first, 0, 4), part(none, 0, 8, logits_from=8))),
        SchedulerOutputs(
            decode=(part(none, 8, 9, samples=True),),
            prefill=(
                part(second, 0, 10),
                part(last, 0, 14, logits_from=13, samples=True),
                part(first, 4, 9, samples=True),
            ),
        ),
        SchedulerOutputs(prefill=(part(second, 10, 14, samples=True),)),
    )
    assert set(found) == {"slot 0", "slot 1"}
    assert_close(found["slot 0"], eager_prompt_logprobs(PROMPT, 3))
    assert_close(found["slot 1"], eager_prompt_logprobs(OTHER, 1))


def test_sampling_uses_the_last_wanted_row() -> None:
    sequence = asking(0, PROMPT, [1, 2, 3])
    step = SchedulerOutputs(prefill=(part(sequence, 0, 9, samples=True),))
    logits = make_runner(make_model("llama"), CONFIG).execute(step)
    assert len(logits) == 9
    (token,) = Sampler().sample(logits, step.scheduled)
    assert token.token_id == int(logits[8].argmax())


def test_output_tokens_have_no_prompt_logprobs() -> None:
    """After a preemption, prompt and output are recomputed together."""
    sequence = Sequence("r", [1, 2, 3], SamplingParams(prompt_logprobs=0), arrival_time=0.0)
    sequence.token_ids += [4, 5]
    logits = random_logits(5, 20)
    item = ScheduledSequence(sequence, 0, 5, 0, True)
    ((_, tokens),) = Sampler().prompt_logprobs(logits, (item,))
    assert [one.token_id for one in tokens] == [2, 3]
    last = ScheduledSequence(sequence, 0, 5, 4, True)
    assert Sampler().prompt_logprobs(logits[4:], (last,)) == []


def test_a_long_prompt_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(11, 40)
    whole = token_logprobs(logits, list(range(11)), [2] * 11)
    monkeypatch.setattr(logprobs, "ROWS_AT_ONCE", 4)
    assert token_logprobs(logits, list(range(11)), [2] * 11) == whole
