"""Requests of every kind, cut after a random output and resumed in a new engine from what was reported.

Tokens, text and end are those of the request that was never cut. The model computes in float64, so that
tokens can be compared.
"""

import random
from collections.abc import Iterable

import pytest
import torch

from engine.execution.runner.async_runner import DeviceExecutor
from engine.execution.runner.model_runner import ModelRunner
from engine.execution.sampling.sampler import Sampler
from engine.outputs import ResumedOutput, SequenceOutput
from engine.requests.engine_request import EngineRequest
from engine.sequence import FinishReason
from tests.engine.execution.serving import make_runner
from tests.engine.execution.test_feature_fuzz import ROOMY, FuzzRequest, build_engine, draw_requests
from tests.tiny_models import make_model

NUM_REQUESTS = 40
NUM_CUTS = 3

Folded = dict[int, tuple[list[int], str, FinishReason | None]]


def generate(
    runner: ModelRunner,
    request: FuzzRequest,
    resumed: tuple[ResumedOutput, ...] = (),
    *,
    is_asynchronous: bool,
) -> list[SequenceOutput]:
    async_executor = DeviceExecutor(runner, Sampler(), torch.device("cpu")) if is_asynchronous else None
    engine = build_engine(runner, ROOMY, async_executor)
    engine.add(EngineRequest(
        "r", request.prompt, request.params, arrival_time=0.0, priority=request.priority,
        cache_salt=request.salt, resumed=resumed,
    ))  # fmt: skip
    outputs: list[SequenceOutput] = []
    while engine.has_work:
        outputs += engine.step().outputs
    return outputs


def fold(outputs: Iterable[SequenceOutput]) -> Folded:
    """Tokens, text and end by index, as a reader of the stream accumulates them."""
    folded: Folded = {}
    for one in outputs:
        tokens, text, _ = folded.get(one.index, ([], "", None))
        tokens = tokens if one.token_id is None else [*tokens, one.token_id]
        folded[one.index] = (tokens, text + one.text + one.held_text, one.finish_reason)
    return folded


def cut(outputs: list[SequenceOutput], number: int, *, loses_end: bool) -> Folded:
    """What was stored of the first `number` outputs.

    An end is an entry after its last token; with `loses_end` the engine died between the two.
    """
    head = fold(outputs[:number])
    last = outputs[number - 1]
    if loses_end and last.finish_reason and last.token_id is not None:
        tokens, text, _ = head[last.index]
        head[last.index] = (tokens, text[: len(text) - len(last.held_text)], None)
    return head


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["in order", "asynchronous"])
def test_a_resumed_request_equals_an_uninterrupted_one(is_asynchronous: bool) -> None:
    rng = random.Random(f"resumed {is_asynchronous}")
    runner = make_runner(make_model(dtype=torch.float64), ROOMY, attention="torch")
    num_cuts = num_lost_ends = 0
    for name, request in draw_requests(rng, NUM_REQUESTS).items():
        whole = generate(runner, request, is_asynchronous=is_asynchronous)
        if any(one.error for one in whole):
            continue  # No token is allowed: it fails again, and nothing is resumed.
        expected = fold(whole)
        positions = range(1, len(whole) + 1)
        for number in rng.sample(positions, min(NUM_CUTS, len(whole))):
            loses_end = rng.random() < 0.5
            head = cut(whole, number, loses_end=loses_end)
            resumed = tuple(
                ResumedOutput(index, tuple(tokens), reason) for index, (tokens, _, reason) in head.items()
            )
            if len(head) == request.params.n and all(reason for _, _, reason in head.values()):
                continue  # Nothing is left to resume.
            tail = fold(generate(runner, request, resumed, is_asynchronous=is_asynchronous))
            num_cuts += 1
            num_lost_ends += loses_end and whole[number - 1].finish_reason is not None
            assert joined(head, tail) == expected, f"{name} cut after {number}: {request.params}"
    assert num_cuts > NUM_REQUESTS
    assert num_lost_ends > 3


def joined(head: Folded, tail: Folded) -> Folded:
    """An output that had ended is not repeated."""
    assert not any(head[index][2] for index in head.keys() & tail.keys()), "output after an end"
    nothing: tuple[list[int], str, None] = ([], "", None)
    result: Folded = {}
    for index in head.keys() | tail.keys():
        first, second = head.get(index, nothing), tail.get(index, nothing)
        result[index] = (first[0] + second[0], first[1] + second[1], first[2] or second[2])
    return result
