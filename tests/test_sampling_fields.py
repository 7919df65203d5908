"""The HTTP API and the worker accept the same sampling values, as both follow the engine's definition."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import pytest
from pydantic import ValidationError

from api.schemas.requests import TaskBody
from engine.requests.deadlines import LONGEST_SECONDS as ENGINES_LONGEST
from engine.sampling_params import SamplingParams
from tokenmill.protocol.limits import MAX_LIMIT_SECONDS, TIME_LIMIT_NAMES
from tokenmill.protocol.messages import GenerateRequest
from worker.errors import RequestRefused
from worker.request_fields import to_deadlines, to_sampling_params

NUMBERS = [
    -(2**63) - 1, -(2**63), -1, 0, 1, 2, 10**9, 2**64 - 1, 2**64, 10**400, True, -0.1, 0.0, 1e-9, 0.5, 1.0,
    1.5, 1e300, float("nan"), float("inf"), float("-inf"), "1", [1],
]  # fmt: skip
LISTS_OF_IDS = [[0], [1, 2], [-1], [True], [1.0], ["a"], 5, "a"]
LISTS_OF_TEXTS = [["a"], ["a", "b"], [], [""], [1], {}, 5]
SWITCHES = [True, False, 0, 1, "true"]
VALUES = {
    "n": [*NUMBERS, 128, 129],
    "max_tokens": NUMBERS,
    "min_tokens": NUMBERS,
    "temperature": NUMBERS,
    "top_k": NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "seed": NUMBERS,
    "presence_penalty": [*NUMBERS, -2, -2.1, 2.1],
    "frequency_penalty": [*NUMBERS, -2, -2.1, 2.1],
    "repetition_penalty": [*NUMBERS, 100, 100.5],
    "logit_bias": [
        {}, {"123": 5}, {"0": -100}, {"1": 100.0, "2": 0.5}, {"x": 1}, {"-1": 100}, {"1.0": 1}, {"": 1},
        {" 1": 1}, {"01": 1}, {"\u0663": 1}, {"1": 100.5},
        {"1": float("nan")}, {"1": "5"}, {"1": True}, {"1": None},
        [1], 5, "5",
    ],
    "allowed_token_ids": [*LISTS_OF_IDS, []],
    "bad_words": LISTS_OF_TEXTS,
    "structured_outputs": [
        {}, {"json": {"type": "object"}}, {"json": '{"type": "object"}'}, {"json": "{"}, {"json": "5"},
        {"json": 5}, {"json": []}, {"json": True}, {"json_object": True},
        {"json_object": False}, {"json_object": 1},
        {"regex": "a+"}, {"regex": ""}, {"regex": 5}, {"choice": ["a", "b"]}, {"choice": []},
        {"choice": [""]}, {"choice": "a"}, {"choice": [1]},
        {"grammar": "root ::= \"a\""}, {"grammar": ""}, {"grammar": ["x"]},
        {"choice": [str(one) for one in range(1001)]}, {"choice": [str(one) for one in range(1000)]},
        {"choice": [f"{one:0>900}" for one in range(100)]}, {"regex": "é" * 40_000}, {"regex": "a" * 60_000},
        {"json": {"a": "x" * 66_000}}, {"json": "[" * 99 + "]" * 99},
        {"json": '{"a":' * 101 + "1" + "}" * 101},
        {"json": '{"const": "\\ud83d"}'}, {"grammar": "x" * 70_000},
        {"regex": "a", "choice": ["a"]}, {"unknown": "a"}, [], 5, "json_object",
    ],
    "stop": LISTS_OF_TEXTS,
    "stop_token_ids": LISTS_OF_IDS,
    "include_stop_str_in_output": SWITCHES,
    "ignore_eos": SWITCHES,
    "skip_special_tokens": SWITCHES,
    "logprobs": [*NUMBERS, 20, 21],
    "prompt_logprobs": [*NUMBERS, 20, 21],
}  # fmt: skip


def refused_by_api(values: dict[str, object]) -> str | None:
    """The field that the error names; None if the values are accepted."""
    try:
        TaskBody.model_validate({"prompt": "x", **values})
    except ValidationError as error:
        return str(error.errors()[0]["loc"][0])
    return None


def refused_by_worker(read: Callable[[], object]) -> str | None:
    """The same for the worker."""
    try:
        read()
    except RequestRefused as refusal:
        return refusal.error.param
    return None


def test_every_field_of_the_engine_is_a_field_of_the_api() -> None:
    assert set(VALUES) == {field.name for field in fields(SamplingParams)} <= set(TaskBody.model_fields)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in VALUES for value in VALUES[field]])
def test_api_and_worker_agree_on_a_value(field: str, value: object) -> None:
    by_api, by_worker = (
        refused_by_api({field: value}),
        refused_by_worker(lambda: to_sampling_params({field: value})),
    )
    assert by_api == by_worker
    assert by_api in (None, field)


@pytest.mark.parametrize(
    ("values", "good"),
    [
        ({"min_tokens": 5, "max_tokens": 5}, True),
        ({"min_tokens": 6, "max_tokens": 5}, False),
        ({"min_tokens": 6}, True),
        ({"min_tokens": 6, "max_tokens": None}, True),
    ],
)
def test_min_tokens_is_at_most_max_tokens(values: dict[str, object], good: bool) -> None:
    expected = None if good else "min_tokens"
    assert refused_by_api(values) == expected
    assert refused_by_worker(lambda: to_sampling_params(values)) == expected


@pytest.mark.parametrize("name", TIME_LIMIT_NAMES)
def test_api_and_worker_agree_on_time_limits(name: str) -> None:
    assert MAX_LIMIT_SECONDS == ENGINES_LONGEST
    for value in (
        1,
        0.001,
        MAX_LIMIT_SECONDS,
        MAX_LIMIT_SECONDS + 1,
        -1,
        float("nan"),
        float("inf"),
        True,
        "5",
    ):
        request = GenerateRequest(id="x", model="m", prompt="p", **{name: value})  # type: ignore[arg-type]
        by_api = refused_by_api({name: value})
        assert by_api == refused_by_worker(partial(to_deadlines, request)), value
        assert by_api in (None, name)
    assert refused_by_api({name: 0}) == name, "0 leaves no time for any work"
