"""The command llm."""

import json
from pathlib import Path

import pytest

from tests.live_service import LiveService
from tests.services.clients.conftest import RunClient

pytestmark = pytest.mark.services

MODELS = """
- model_id: chat
  model_name: tiny-llama
  api_base: {url}/v1
  can_stream: true
  supports_schema: true
  supports_tools: true
- model_id: text
  model_name: tiny-llama
  api_base: {url}/v1
  completion: true
"""


@pytest.fixture(autouse=True)
def models(live: LiveService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of llm, with the service's model in its configuration."""
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=live.api_url))
    return {"LLM_USER_PATH": str(tmp_path)}


@pytest.mark.parametrize("arguments", [["-m", "chat"], ["-m", "chat", "--no-stream"], ["-m", "text"]])
def test_a_prompt(run_client: RunClient, models: dict[str, str], arguments: list[str]) -> None:
    options = ["-o", "max_tokens", "6", "-o", "seed", "1", "-o", "temperature", "0.5"]
    said = run_client("llm", "hello", *arguments, *options, env=models)
    (logged,) = json.loads(run_client("llm", "logs", "--json", env=models))
    assert logged["response"] == said.removesuffix("\n")
    if "text" not in arguments:
        assert logged["output_tokens"] == 6


def test_a_schema(run_client: RunClient, models: dict[str, str]) -> None:
    said = run_client("llm", "hello", "-m", "chat", "--schema", "sure bool", env=models)
    assert type(json.loads(said)["sure"]) is bool


def test_a_chat_with_tools(run_client: RunClient, models: dict[str, str]) -> None:
    arguments = ["-m", "chat", "-T", "llm_version", "-o", "max_tokens", "5"]
    run_client("llm", "chat", *arguments, env=models, text="hello\nmore\nexit\n")
    first, second = json.loads(run_client("llm", "logs", "--json", env=models))
    assert first["conversation_id"] == second["conversation_id"]
    assert second["input_tokens"] > first["input_tokens"]
