"""Any body is a task or an error that names what is wrong."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from api.json_body import parse_object
from api.problems import Problem, from_validation
from api.schemas.openai.chat import ChatCompletionBody
from api.schemas.openai.responses import ResponseBody
from api.schemas.openai.text import CompletionBody
from api.schemas.requests import TaskBody
from api.submission import body_digest, estimate_cost, to_request
from tokenmill.protocol.messages import GenerateRequest

# Without surrogates, which `parse_object` refuses.
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
SCALARS = (
    st.none() | st.booleans() | TEXT | st.floats() | st.sampled_from([0, 1, -1, 2, 2**63, 10**30, -(2**64)])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def objects(*names: str, **members: Any) -> st.SearchStrategy[Any]:
    """Objects with some of the members; those of `names` have any value. Sometimes any other value."""
    optional = {**dict.fromkeys(names, VALUES), **members}
    return st.fixed_dictionaries({}, optional=optional) | VALUES


def lists(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(items, max_size=3) | VALUES


PARTS = lists(
    objects("text", "refusal", type=st.sampled_from(["text", "input_text", "refusal", "image_url"]))
)
FUNCTION = objects("arguments", "parameters", "description", name=st.just("f") | TEXT)
CALLS = lists(objects("id", type=st.just("function"), function=FUNCTION))
ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot"])
MESSAGES = lists(objects("name", "tool_call_id", role=ROLES, content=TEXT | PARTS, tool_calls=CALLS))
TYPES = st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "item_reference"])
ITEMS = lists(
    objects("call_id", "name", "arguments", type=TYPES, role=ROLES, content=TEXT | PARTS, output=TEXT | PARTS)
)
CHOICES = st.sampled_from(["none", "auto", "required"]) | objects(
    name=st.just("f") | TEXT, type=st.just("function"), function=FUNCTION
)
SHARED = {
    **dict.fromkeys(
        ["n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "logit_bias", "priority", "user",
         "metadata", "stream", "logprobs", "top_logprobs", "structured_outputs", "echo", "best_of", "suffix",
         "store", "chat_template_kwargs", "reasoning_effort", "prompt_logprobs", "timeout_seconds"], VALUES
    ),
    "stream_options": objects("include_usage", "continuous_usage_stats"),
    "response_format": objects(
        "schema",
        type=st.sampled_from(["text", "json_object", "json_schema"]),
        json_schema=objects("name", "schema", "strict"),
    ),
}  # fmt: skip
TOOL_FIELDS = {"tool_choice": CHOICES, "parallel_tool_calls": VALUES}
CHATS = st.fixed_dictionaries(
    {"messages": MESSAGES},
    optional={
        **SHARED, **TOOL_FIELDS, "max_completion_tokens": VALUES,
        "tools": lists(objects(type=st.just("function"), function=FUNCTION)),
    },
)  # fmt: skip
RESPONSES = st.fixed_dictionaries(
    {"input": TEXT | ITEMS},
    optional={
        **SHARED, **TOOL_FIELDS,
        **dict.fromkeys(
            ["max_output_tokens", "instructions", "background", "include", "truncation", "conversation"],
            VALUES,
        ),
        "reasoning": objects("effort", "summary"),
        "text": objects(format=objects("schema", "name", type=st.sampled_from(["text", "json_schema"]))),
        "tools": lists(objects("parameters", type=st.just("function"), name=st.just("f") | TEXT)),
    },
)  # fmt: skip
TEXTS = st.fixed_dictionaries({"prompt": TEXT | VALUES}, optional=SHARED)


def check(body: Any, kind: type[BaseModel], to_tasks: Callable[[Any], Sequence[TaskBody]]) -> None:
    """Only a `Problem` or a validation error with a message is raised, and a task can be queued."""
    try:
        tasks = to_tasks(kind.model_validate(parse_object(json.dumps(body).encode())))
    except ValidationError as error:
        problem = from_validation(error)
    except Problem as error:
        problem = error
    else:
        for task in tasks:
            request = to_request(task, "0" * 32, "m")
            stored = json.loads(json.dumps(request.to_payload(), allow_nan=False))
            assert GenerateRequest.from_payload(stored).to_payload() == request.to_payload()
            assert estimate_cost(task, None) > 0
            assert body_digest(task)
        return
    assert 400 <= problem.status < 500
    json.dumps(problem.to_json("id"), allow_nan=False).encode()


@given(CHATS)
@example({"messages": [{"role": "user", "content": "x"}], "tools": [], "tool_choice": "none"})
def test_any_chat(body: Any) -> None:
    check(body, ChatCompletionBody, lambda chat: [chat.to_task("cancel")])


@given(TEXTS)
@example({"prompt": [1, 2], "echo": True})
def test_any_text(body: Any) -> None:
    check(body, CompletionBody, lambda text: text.to_tasks("cancel"))


@given(RESPONSES)
@example({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1"}]})
def test_any_response(body: Any) -> None:
    check(body, ResponseBody, lambda response: [response.to_task("cancel", [])])
