"""LiteLLM's proxy between clients and the service."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import free_port
from tests.live_service import WATCHDOG_SECONDS, LiveService, wait_for
from tests.services.clients.conftest import client_environment, command_of

pytestmark = pytest.mark.services

KEY = "sk-0123456789abcdef0123456789abcdef"
MESSAGES: Any = [{"role": "user", "content": "hello"}]
PROVIDERS = ["openai", "hosted_vllm"]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "decide",
            "parameters": {
                "type": "object",
                "properties": {"sure": {"type": "boolean"}},
                "required": ["sure"],
            },
        },
    }
]

CALL = '<tool_call>\n{"name": "decide", "arguments": {"sure": true}}\n</tool_call>'


@pytest.fixture(scope="module")
def proxy(live: LiveService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a proxy that knows the service's model under the name of each provider."""
    directory = tmp_path_factory.mktemp("litellm")
    names = {**{name: name for name in PROVIDERS}, "text": "text-completion-openai"}
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": f"{provider}/tiny-llama", "api_base": f"{live.api_url}/v1", "api_key": "any",
            },
        }
        for name, provider in names.items()
    ]  # fmt: skip
    config = directory / "config.json"
    config.write_text(json.dumps({"model_list": models}))
    port, log = free_port(), directory / "log"
    more = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    where = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(command_of("litellm")), *where, "--telemetry", "False"],
            cwd=directory,
            env=client_environment(directory, more),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            return httpx.get(f"{url}/health/liveliness").status_code == 200
        except httpx.TransportError:
            return False

    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(is_ready, "the proxy answers")
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def client(proxy: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0, timeout=WATCHDOG_SECONDS) as made:
        yield made


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_chat(client: openai.OpenAI, name: str) -> None:
    asked: Any = {"model": name, "messages": MESSAGES, "max_tokens": 8, "seed": 3}
    whole = client.chat.completions.create(**asked)
    text, usage = "", None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens > 0


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_tool(client: openai.OpenAI, name: str) -> None:
    # A grammar makes the random model write the call; the parser knows nothing of it.
    grammar = {"structured_outputs": {"choice": [CALL]}}
    asked: Any = {"model": name, "messages": MESSAGES, "tools": TOOLS, "extra_body": grammar}
    whole = client.chat.completions.create(**asked)
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("decide", {"sure": True})
    arguments = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments or "" if delta.function else ""
    assert arguments == call.function.arguments
    history = [*MESSAGES, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "x"}]
    answer = client.chat.completions.create(model=name, messages=history, tools=TOOLS, max_tokens=4)
    assert answer.choices[0].message.role == "assistant"


def test_a_text(client: openai.OpenAI) -> None:
    asked: Any = {"model": "text", "prompt": "hello", "max_tokens": 8, "seed": 3}
    whole = client.completions.create(**asked)
    chunks = client.completions.create(**asked, stream=True)
    # Its chunk with the usage has a choice without text.
    text = "".join(choice.text or "" for chunk in chunks for choice in chunk.choices)
    assert (text, whole.choices[0].finish_reason) == (whole.choices[0].text, "length")


def test_a_response(client: openai.OpenAI) -> None:
    asked: Any = {"model": "openai", "input": "hello", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == whole.output_text != ""


def test_a_message_of_anthropics_api(proxy: str) -> None:
    body = {"model": "openai", "messages": MESSAGES, "max_tokens": 8}
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(f"{proxy}/v1/messages", json=body, headers=headers, timeout=WATCHDOG_SECONDS)
    assert (reply.status_code, reply.json()["usage"]["output_tokens"] > 0) == (200, True), reply.text


def test_an_error(client: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "x " * 3000}]
    with pytest.raises(openai.BadRequestError, match="has 6016 tokens"):
        client.chat.completions.create(model="openai", messages=long)
