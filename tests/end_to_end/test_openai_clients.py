"""OpenAI's own client, and LangChain's, against the whole service."""

import asyncio
import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import openai
import pytest
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.live_service import LiveService, wait_for
from tests.tiny_models import save_model

KEY = "any"
MESSAGES: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hello world"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    limits = {"TOKENMILL_DTYPE": "float32", "TOKENMILL_MAX_NUM_SEQS": "8", "TOKENMILL_LEASE_SECONDS": "2"}
    model_dir = save_model(tmp_path_factory.mktemp("model"))
    with LiveService(model_dir, tmp_path_factory.mktemp("service"), limits) as running:
        yield running


@pytest.fixture
def client(service: LiveService) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.api_url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    (served,) = client.models.list().data
    assert client.models.retrieve(served.id) == served
    return served.id


def test_a_chat_is_the_same_streamed_and_at_once(client: openai.OpenAI, model: str) -> None:
    asked: Any = {
        "model": model, "messages": MESSAGES, "max_completion_tokens": 12, "seed": 7, "n": 2,
        "temperature": 0.8,
        "logprobs": True, "top_logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": 0.1,
        "logit_bias": {"5": -100}, "stop": ["zzzz"], "user": "ann", "metadata": {"run": "7"},
        "extra_body": {"top_k": 50, "min_p": 0.01, "ignore_eos": True, "priority": 1, "cache_salt": "s"},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts, tokens, usage = ["", ""], [0, 0], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len(choice.logprobs.content or ()) if choice.logprobs else 0

    assert [choice.message.content for choice in whole.choices] == texts
    assert [len(choice.logprobs.content or ()) for choice in whole.choices if choice.logprobs] == tokens
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert whole.usage is not None
    assert usage is not None
    assert whole.usage.completion_tokens == usage.completion_tokens == sum(tokens) == 24


def test_azures_client(service: LiveService, model: str) -> None:
    azure = openai.AzureOpenAI(azure_endpoint=service.api_url, api_version="2024-10-21", api_key=KEY)
    with azure as client:
        chunks = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=4, stream=True)
        assert {chunk.model for chunk in chunks} == {model}


def test_the_async_client_streams_many_at_once(service: LiveService, model: str) -> None:
    async def text(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=10, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def texts() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{service.api_url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*(text(client, seed % 2) for seed in range(16)))

    assert len(set(asyncio.run(texts()))) <= 2


def test_a_text_completion(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": ["one two", "three"], "max_tokens": 6, "seed": 1, "logprobs": 1}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == texts
    assert all(choice.logprobs and choice.logprobs.tokens for choice in whole.choices)


@pytest.mark.parametrize("prompt", ["one two", [5, 60, 61]])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_the_prompt_and_its_logprobs(
    service: LiveService, client: openai.OpenAI, model: str, prompt: Any, stream: bool
) -> None:
    """The loglikelihood requests of lm-evaluation-harness."""
    field = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    task_id = service.submit(**{field: prompt}, max_tokens=1, temperature=0, prompt_logprobs=1, logprobs=1)
    task = service.wait_task(task_id)
    asked: Any = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True}
    text = ""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    offsets: list[int] = []
    reply: Any = client.completions.create(**asked, logprobs=1, stream=stream)
    for part in reply if stream else [reply]:
        (choice,) = part.choices
        text += choice.text
        if choice.logprobs:
            tokens += choice.logprobs.tokens or []
            logprobs += choice.logprobs.token_logprobs or []
            offsets += choice.logprobs.text_offset or []
    expected = [*task["prompt_logprobs"][1:], *task["outputs"][0]["logprobs"]]
    assert logprobs == [None, *(token["logprob"] for token in expected)]
    assert tokens[1:] == [token["token"] for token in expected]
    assert len(offsets) == len(tokens)
    if isinstance(prompt, str):
        assert text.startswith(prompt)
    assert client.completions.create(**asked).choices[0].text == text
    assert client.completions.create(**asked).choices[0].logprobs is None


class Colour(StrEnum):
    """A colour."""

    red = "red"
    blue = "blue"


class Answer(BaseModel):
    """An answer whose schema a random model can satisfy in a few tokens."""

    colour: Colour
    sure: bool


def test_an_answer_is_parsed(client: openai.OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    text = client.chat.completions.create(
        model=model, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=8
    )
    assert (text.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
def test_a_call_that_is_required(client: openai.OpenAI, model: str, choice: Any, reason: str) -> None:
    asked: Any = {
        "model": model, "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 3,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert whole.choices[0].finish_reason == reason
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or []
    assert (streamed.id, streamed.function.arguments) != ("", "")
    assert streamed.function.arguments == call.function.arguments


def test_a_call_that_the_model_chose_and_its_result(client: openai.OpenAI, model: str) -> None:
    """A grammar makes the random model write the call; the parser knows nothing of it."""
    asked: Any = {
        "model": model, "messages": MESSAGES, "tools": TOOLS,
        "extra_body": {"structured_outputs": {"choice": [CALL]}},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert (name, arguments) == ("weather", '{"city": "Paris"}')

    history = [*MESSAGES, whole.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(model=model, messages=history, tools=TOOLS, max_tokens=5)
    assert answer.choices[0].message.role == "assistant"


def test_errors_are_the_clients_own(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    image: Any = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": image}])
    assert refused.value.param == "messages.0.content"
    assert "image_url" in str(refused.value)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "x " * 3000}], stream=stream
            )
        assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels(
    service: LiveService, client: openai.OpenAI, model: str, stream: bool
) -> None:
    asked: Any = {
        "model": model, "messages": MESSAGES, "max_tokens": 1900, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    before = num_cancelled(service)
    if stream:
        with client.chat.completions.create(**asked, stream=True) as chunks:
            next(iter(chunks))
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=0.3).chat.completions.create(**asked)
    wait_for(lambda: num_cancelled(service) > before, "the task is cancelled")


def num_cancelled(service: LiveService) -> float:
    """How many tasks were cancelled, from the metrics."""
    lines = service.call("GET", "/metrics").body.decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if 'reason="cancelled"' in line)


def test_a_response_in_the_background(client: openai.OpenAI, model: str) -> None:
    stream = client.responses.create(
        model=model, input="hello", background=True, stream=True, metadata={"a": "b"},
        extra_body={"structured_outputs": {"choice": ["the red fox"]}},
    )  # fmt: skip
    whole = list(stream)
    assert whole[0].type == "response.created"
    assert whole[-1].type == "response.completed"
    response_id = whole[0].response.id
    read = client.responses.retrieve(response_id)
    text = "".join(event.delta for event in whole if event.type == "response.output_text.delta")
    assert (read.output_text, read.metadata) == (text, {"a": "b"})
    (item,) = client.responses.input_items.list(response_id)
    assert item.type == "message"
    resumed = client.responses.retrieve(response_id, stream=True, starting_after=4)
    assert list(resumed) == [event for event in whole if event.sequence_number > 4]
    with client.responses.stream(response_id=response_id) as helper:
        assert helper.get_final_response().output_text == text
    long = client.responses.create(
        model=model, input="hello", background=True, extra_body={"ignore_eos": True, "max_tokens": 1900}
    )
    assert client.responses.cancel(long.id).status == "cancelled"


RESPONSE_TOOLS: Any = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}, "auto"])
def test_the_calls_of_a_response(client: openai.OpenAI, model: str, choice: Any) -> None:
    asked: Any = {
        "model": model, "input": "hello", "tools": RESPONSE_TOOLS, "tool_choice": choice,
        "parallel_tool_calls": False,
        # A grammar makes the random model write the call; the parser knows nothing of it.
        "extra_body": {"seed": 3, **({"structured_outputs": {"choice": [CALL]}} if choice == "auto" else {})},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    (call,) = whole.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)["city"] in ("Paris", "Rome")) == ("weather", True)
    with client.responses.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_response().output
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    last = {"model": model, "max_output_tokens": 16, "tools": RESPONSE_TOOLS, "extra_body": {"seed": 1}}
    long: Any = {**last, "input": [{"role": "user", "content": "hello"}, *whole.output, result]}
    short: Any = {**last, "input": [result], "previous_response_id": whole.id}
    texts = [client.responses.create(**fields).output_text for fields in (long, short)]
    assert texts[0] == texts[1] != ""


def test_a_response_is_parsed(client: openai.OpenAI, model: str) -> None:
    parsed = client.responses.parse(model=model, input="hello", text_format=Answer)
    assert isinstance(parsed.output_parsed, Answer)
    tool = openai.pydantic_function_tool(Answer)["function"]
    flat: Any = [{"type": "function", **tool}]
    called = client.responses.parse(
        model=model, input="hello", tools=flat, tool_choice="required", parallel_tool_calls=False
    )
    (item,) = called.output
    assert item.type == "function_call"
    assert Answer.model_validate(item.parsed_arguments)


def test_langchain(service: LiveService, model: str) -> None:
    url = f"{service.api_url}/v1"
    chat = ChatOpenAI(base_url=url, api_key=lambda: KEY, model=model, max_completion_tokens=8)
    assert isinstance(chat.invoke("hello").content, str)
    assert "".join(str(part.content) for part in chat.stream("hello")) != ""
    called = chat.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = called.bind(max_tokens=1000, seed=3).invoke("weather?").tool_calls
    assert (call["name"], call["args"]["city"] in ("Paris", "Rome")) == ("weather", True)
    responses = ChatOpenAI(base_url=url, api_key=lambda: KEY, model=model, use_responses_api=True)
    answer = responses.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False).invoke("weather?")
    (call,) = answer.tool_calls
    again: Any = [("user", "weather?"), answer, ToolMessage("sunny", tool_call_id=call["id"])]
    assert responses.bind(max_tokens=5).invoke(again).response_metadata["status"] == "incomplete"
