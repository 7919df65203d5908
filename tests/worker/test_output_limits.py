"""The output limit and the sampling defaults of a task, which stay the same for its life."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.fakes import MODEL, job_data, served_model
from tokenmill.protocol.limits import MAX_OUTPUT_VALUES, num_output_values, output_limit
from tokenmill.protocol.messages import GenerateRequest
from tokenmill.protocol.records import Claimed
from worker.errors import RequestRefused
from worker.preparation import Preparation, ServedModel

DEFAULTS = {"temperature": 0.6, "top_k": 20, "max_tokens": 50}


def claimed(
    sampling: dict[str, Any] | None = None, prompt: tuple[int, ...] = (1, 2, 3), **more: Any
) -> Claimed:
    request = GenerateRequest(id="t", model=MODEL, prompt_token_ids=prompt, sampling=sampling or {})
    return Claimed(
        task_id="t",
        owner="o",
        attempt=1,
        queue=f"tm:{MODEL}:2:default",
        priority=2,
        accepted_at=0.0,
        data=job_data(request.to_payload()),
        num_outputs=(sampling or {}).get("n", 1),
        **more,
    )


def model_with(**values: Any) -> ServedModel:
    return replace(served_model(), **values)


@given(
    requested=st.none() | st.integers(1, 2**62),
    default=st.none() | st.integers(1, 2**20),
    room=st.none() | st.integers(1, 2**21),
    n=st.integers(1, 128),
    logprobs=st.none() | st.integers(0, 20),
)
def test_the_size_of_an_output_is_bounded(
    requested: int | None, default: int | None, room: int | None, n: int, logprobs: int | None
) -> None:
    limit = output_limit(requested=requested, default=default, room=room, n=n, logprobs=logprobs)

    assert n * num_output_values(limit.max_tokens, logprobs) <= MAX_OUTPUT_VALUES
    assert (
        1 <= limit.max_tokens <= min(one for one in (requested, room, MAX_OUTPUT_VALUES) if one is not None)
    )
    assert limit.requested == requested
    if limit.bound_by == "max_tokens":
        assert limit.max_tokens == requested
    if requested is None and default is not None:
        assert limit.max_tokens <= default


@pytest.mark.parametrize(
    ("sampling", "length", "max_tokens", "bound_by"),
    [
        ({"max_tokens": 262_145}, 200, 197, "model_length"),
        ({"max_tokens": 262_145}, 10**6, 262_144, "output_size"),
        ({"max_tokens": 16_384, "logprobs": 20}, 10**6, 11_915, "output_size"),
        ({"logprobs": 20}, 10**6, 11_915, "output_size"),
        ({}, 10**6, 262_144, "output_size"),
        ({}, 200, 197, "model_length"),
        ({"max_tokens": 197}, 200, 197, "max_tokens"),
        ({"max_tokens": 5}, 200, 5, "max_tokens"),
        ({"n": 128, "logprobs": 20, "min_tokens": 150}, 200, 93, "output_size"),
    ],
)
def test_the_output_limit_is_recorded(
    sampling: dict[str, Any], length: int, max_tokens: int, bound_by: str
) -> None:
    """The worker does not refuse a task that the API accepted."""
    prepared = Preparation(model_with(max_sequence_tokens=length)).prepare(claimed(sampling))

    assert prepared.output_limit is not None
    assert json.loads(prepared.output_limit.to_json()) == {
        "max_tokens": max_tokens,
        "requested": sampling.get("max_tokens"),
        "bound_by": bound_by,
    }
    assert prepared.request.params.max_tokens == max_tokens
    assert prepared.request.params.min_tokens <= max_tokens


def test_too_many_prompt_logprobs_are_refused() -> None:
    preparation = Preparation(model_with())
    assert preparation.prepare(claimed({"prompt_logprobs": 20}, prompt=(1,) * 11_915))
    with pytest.raises(RequestRefused, match="prompt_logprobs"):
        preparation.prepare(claimed({"prompt_logprobs": 20}, prompt=(1,) * 11_916))


def test_the_models_defaults_apply_to_unset_fields() -> None:
    """vllm follows `generation_config.json` by default. mlx-vlm#1331: it was ignored silently."""
    preparation = Preparation(model_with(default_sampling=DEFAULTS))

    params = preparation.prepare(claimed({"seed": 7})).request.params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.6, 20, 50, 7)
    requested = {"temperature": 1, "top_k": 0, "max_tokens": 70}
    params = preparation.prepare(claimed(requested)).request.params
    assert (params.temperature, params.top_k, params.max_tokens) == (1, 0, 70)
    assert preparation.prepare(claimed({"temperature": None})).request.params.temperature == 0.6
    limit = preparation.prepare(claimed()).output_limit
    assert limit is not None
    assert (limit.requested, limit.bound_by) == (None, "generation_config")


def test_a_default_makes_no_request_invalid() -> None:
    preparation = Preparation(model_with(default_sampling=DEFAULTS))
    params = preparation.prepare(claimed({"min_tokens": 60})).request.params
    assert (params.min_tokens, params.max_tokens) == (60, 60)


@pytest.mark.parametrize(("stored", "temperature"), [('{"temperature": 0.6}', 0.6), ("{}", 1.0), ("", 1.0)])
def test_a_resumed_task_keeps_its_first_defaults(stored: str, temperature: float) -> None:
    """Whatever defaults the resuming worker has."""
    task = claimed(prompt_token_ids=(1, 2, 3), fingerprint="f1", sampling_defaults=stored)
    for own in ({}, {"temperature": 0.1, "top_k": 3}):
        prepared = Preparation(model_with(default_sampling=own)).prepare(task)
        assert prepared.request.params.temperature == temperature
        assert prepared.request.params.top_k == 0
