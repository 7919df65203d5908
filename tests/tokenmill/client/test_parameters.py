"""The types of the clients name the fields of the service, no more and no less."""

from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel

from api.schemas import replies as served
from api.schemas.requests import Message as MessageBody
from api.schemas.requests import TaskBody, WebhookBody
from engine.sampling_params import SamplingParams
from engine.structured_outputs import StructuredOutputs as Constraints
from tokenmill.client import parameters, replies


def names(parameters: type) -> set[str]:
    return {field.name for field in fields(parameters)}


def test_the_sampling_parameters_are_those_of_the_engine() -> None:
    assert set(get_type_hints(parameters.SamplingParameters)) == names(SamplingParams)
    assert set(get_type_hints(parameters.StructuredOutputs)) == names(Constraints)


def test_the_parameters_of_a_submission_are_those_of_the_service() -> None:
    assert {*get_type_hints(parameters.TaskParameters), "prompt"} == set(TaskBody.model_fields)
    assert set(get_type_hints(parameters.Message)) == set(MessageBody.model_fields)
    assert set(get_type_hints(parameters.Webhook)) == set(WebhookBody.model_fields)


def value_of(annotation: Any) -> Any:
    """A value that each type of the sampling parameters contains."""
    text = str(annotation)
    if "StructuredOutputs" in text:
        return {"json_object": True}
    samples = {
        "Mapping": {"5": 1.0},
        "Sequence[int]": [5],
        "str": ["x"],
        "bool": True,
        "int": 1,
        "float": 1.0,
    }
    return next(sample for name, sample in samples.items() if name in text)


@pytest.mark.parametrize("name", get_type_hints(parameters.SamplingParameters))
def test_the_service_accepts_each_type(name: str) -> None:
    value = value_of(get_type_hints(parameters.SamplingParameters)[name])

    body = TaskBody.model_validate({"prompt": "a", "max_tokens": 5, name: value})

    assert body.sampling_params is not None


@pytest.mark.parametrize(
    ("view", "reply"),
    [
        (served.Task, replies.TaskFields),
        (served.Output, replies.Output),
        (served.Alternative, replies.Alternative),
        (served.TokenLogprobsView, replies.TokenLogprobs),
        (served.PromptLogprobsView, replies.PromptTokenLogprobs),
        (served.QueuePosition, replies.QueuePosition),
        (served.UsageView, replies.Usage),
        (served.OutputLimitView, replies.OutputLimit),
        (served.Timings, replies.Timings),
        (served.ErrorView, replies.TaskProblem),
        (served.Urls, replies.Urls),
        (served.TaskSummary, replies.TaskSummaryFields),
        (served.WebhookDeliveryView, replies.WebhookState),
        (served.Queue, replies.Queue),
        (served.WorkerView, replies.Worker),
    ],
)
def test_a_reply_has_the_fields_that_the_service_sends(view: type[BaseModel], reply: type[BaseModel]) -> None:
    assert set(view.model_fields) == set(reply.model_fields)
