"""guidellm and aiperf. Both read the length of texts with the tokenizer of the model."""

import json
import shutil
from pathlib import Path

import pytest

from tests.live_service import LiveService
from tests.services.clients.conftest import RunClient

pytestmark = pytest.mark.services

REQUESTS = 12
TOKENS = 16
REVISION = "0" * 40


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(
    live: LiveService, tiny_model: Path, run_client: RunClient, tmp_path: Path, route: str
) -> None:
    run_client(
        "guidellm", "run", "--backend", f"kind=openai_http,target={live.api_url},request_format={route}",
        "--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={tiny_model}",
        "--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "benchmarks.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (REQUESTS, [])
    assert {one["output_metrics"]["text_tokens"] for one in requests["successful"]} == {TOKENS}


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses"])
def test_aiperf(
    live: LiveService, tiny_model: Path, run_client: RunClient, tmp_path: Path, endpoint: str
) -> None:
    cached = tmp_path / "huggingface" / "hub" / "models--tests--tiny"
    shutil.copytree(tiny_model, cached / "snapshots" / REVISION)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(REVISION)
    run_client(
        "aiperf", "profile", "--model", "tiny-llama", "--url", live.api_url, "--endpoint-type", endpoint,
        "--streaming", "--tokenizer", "tests/tiny", "--request-count", str(REQUESTS), "--concurrency", "4",
        "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", str(TOKENS),
        "--extra-inputs", "ignore_eos:true", "--ui", "none",
        "--output-artifact-dir", str(tmp_path / "results"),
        # It reads no usage from a response that ended at its limit: the event is `response.incomplete`.
        *(["--use-server-token-count"] if endpoint != "responses" else []),
    )  # fmt: skip
    results = json.loads((tmp_path / "results" / "profile_export_aiperf.json").read_text())
    assert results["request_count"]["avg"] == REQUESTS
    assert results.get("error_request_count", {"avg": 0})["avg"] == 0
    scraped = json.loads((tmp_path / "results" / "server_metrics_export.json").read_text())
    assert scraped["summary"]["endpoints_successful"] == [f"{live.api_url}/metrics"]
    counted = results["output_sequence_length"]["avg"]
    assert counted == TOKENS if endpoint != "responses" else counted > 0
