"""The one definition of a request's sampling fields."""

from dataclasses import fields

import pytest

from engine.errors import InvalidParameter
from engine.sampling_params import SamplingParams
from engine.structured_outputs import StructuredOutputs


def test_each_field_has_a_rule_that_accepts_its_default() -> None:
    params = SamplingParams()
    for field in fields(params):
        assert field.metadata["description"]
        if (default := getattr(params, field.name)) is not None:
            field.metadata["rule"].check(field.name, default)


def test_json_values_are_converted() -> None:
    params = SamplingParams.from_json(
        {
            "stop": ["a"],
            "stop_token_ids": [1],
            "logit_bias": {"12": -3.5},
            "structured_outputs": {"choice": ["a", "b"]},
        }
    )
    assert params == SamplingParams(
        stop=("a",),
        stop_token_ids=(1,),
        logit_bias={12: -3.5},
        structured_outputs=StructuredOutputs(choice=("a", "b")),
    )


def test_null_members_are_unset() -> None:
    assert SamplingParams.from_json({"max_tokens": None, "temperature": None}) == SamplingParams()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "sampling: must be an object"),
        ({"best_of": 2}, "best_of: is not a sampling parameter"),
        ({"n": 0}, "n: must be at least 1 and at most 128, not 0"),
        ({"n": True}, "n: must be an integer, not True"),
        ({"top_p": 0}, "top_p: must be a finite number above 0 and at most 1, not 0"),
        ({"temperature": float("nan")}, "temperature: must be a finite number at least 0, not nan"),
        ({"seed": 10**5000}, "seed: must be at least .* not a number of thousands of digits"),
        ({"stop": ["\ud83d"]}, "stop: is not valid Unicode text: unpaired surrogate at 0"),
        ({"min_tokens": 3, "max_tokens": 2}, r"min_tokens: must be at most max_tokens \(2\)"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs: regex: must be text"),
    ],
)
def test_the_error_names_the_field(values: object, message: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{message}"):
        SamplingParams.from_json(values)
