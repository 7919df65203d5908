"""API and engine say the same of every sampling value, though neither room knows the other."""

from dataclasses import fields

import pytest
from pydantic import ValidationError

from api.request_schemas import TaskBody
from engine.errors import InvalidParameter
from engine.sampling_params import SamplingParams

NUMBERS = [
    -(2**63) - 1, -(2**63), -1, 0, 1, 2, 10**9, 2**64 - 1, 2**64, 10**400, True, -0.1, 0.0, 1e-9, 0.5, 1.0,
    1.5, 1e300, float("nan"), float("inf"), float("-inf"), "1", [1],
]  # fmt: skip
VALUES = {
    "max_tokens": NUMBERS,
    "temperature": NUMBERS,
    "top_k": NUMBERS,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "seed": NUMBERS,
    "stop": [["a"], ["a", "b"], [""], [1], {}, 5],
    "stop_token_ids": [[0], [1, 2], [-1], [True], [1.0], ["a"], 5, "a"],
    "ignore_eos": [True, False, 0, 1, "true"],
}


def api_takes(field: str, value: object) -> bool:
    try:
        TaskBody.model_validate({"prompt": "x", field: value})
    except ValidationError:
        return False
    return True


def engine_takes(field: str, value: object) -> bool:
    try:
        SamplingParams(**{field: tuple(value) if isinstance(value, list) else value})  # type: ignore[arg-type]
    except InvalidParameter:
        return False
    return True


def test_every_field_of_the_engine_is_a_field_of_the_api() -> None:
    assert set(VALUES) == {field.name for field in fields(SamplingParams)} <= set(TaskBody.model_fields)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in VALUES for value in VALUES[field]])
def test_a_value_is_good_for_both_or_for_neither(field: str, value: object) -> None:
    assert api_takes(field, value) is engine_takes(field, value)
