"""The import contracts hold, and each of them can break: a violation is planted in a copy of the tree."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ["api", "engine", "monitoring", "tokenmill", "worker"]

# contract's first word(s) -> (file that gets the line, the line)
PLANTS = {
    "rooms:": [
        ("monitoring/http.py", "import worker.errors"),
        ("tokenmill/protocol/keys.py", "import tokenmill.client.sse"),
        ("tokenmill/client/calls.py", "import monitoring.families"),
        ("api/app.py", "import tokenmill.cli.console"),
    ],
    "engine: rooms": [
        ("engine/sequence.py", "import engine.waiting.queue"),
        ("engine/waiting/queue.py", "import engine.scheduling.scheduler"),
        ("engine/checkpoint/check.py", "import engine.waiting.ageing"),
        ("engine/scheduling/budget.py", "import engine.text.stop_strings"),
        ("engine/text/detokenizer.py", "import engine.requests.deadlines"),
        ("engine/requests/deadlines.py", "import engine.steps.pipeline"),
        ("engine/steps/pipeline.py", "import engine.engine"),
        ("engine/engine.py", "import engine.execution.plans"),
        ("engine/execution/plans.py", "import engine.offline.llm"),
    ],
    "engine.execution:": [
        ("engine/execution/machine/async_copy.py", "import engine.execution.attention.probe"),
        ("engine/execution/attention/interface.py", "import engine.execution.runner.inputs"),
        ("engine/execution/sampling/draw.py", "import engine.execution.attention.interface"),
        ("engine/execution/text/tokenizer.py", "import engine.execution.sampling.sampler"),
        ("engine/execution/layers/packed_linears.py", "import engine.execution.runner.inputs"),
        ("engine/execution/runner/inputs.py", "import engine.execution.graphs.decode_graphs"),
        ("engine/execution/graphs/decode_buffers.py", "import engine.execution.loading.loader"),
        ("engine/execution/loading/loader.py", "import engine.execution.deterministic.runner"),
        ("engine/execution/deterministic/runner.py", "import engine.execution.plans"),
        ("engine/execution/plans.py", "import engine.execution.build"),
    ],
    "protocol:": [
        ("tokenmill/protocol/messages.py", "import redis"),
        ("tokenmill/protocol/keys.py", "import worker.errors"),
        ("tokenmill/protocol/naming.py", "import rq"),
    ],
    "process:": [
        ("tokenmill/process/hold_unusable.py", "import redis"),
        ("tokenmill/process/logs.py", "import flask"),
    ],
    "tokenmill: rooms": [
        ("tokenmill/client/calls.py", "import tokenmill.serve.state_directory"),
        ("tokenmill/client/sse.py", "import tokenmill.settings.errors"),
        ("tokenmill/serve/checks.py", "import tokenmill.doctor.finding"),
        ("tokenmill/bench/load.py", "import tokenmill.doctor.finding"),
        ("tokenmill/settings/errors.py", "import tokenmill.client.calls"),
        ("tokenmill/protocol/redis_url.py", "import tokenmill.client.calls"),
        ("tokenmill/process/hold_unusable.py", "import tokenmill.protocol.keys"),
    ],
    "client:": [
        ("tokenmill/client/requests.py", "import click"),
        ("tokenmill/client/streams.py", "import rq"),
        ("tokenmill/client/replies.py", "import tokenmill.settings.errors"),
    ],
    "tokenmill.client:": [
        ("tokenmill/client/calls.py", "import tokenmill.client.requests"),
        ("tokenmill/client/steps.py", "import tokenmill.client.calls"),
        ("tokenmill/client/requests.py", "import tokenmill.client.sync_transport"),
        ("tokenmill/client/event_steps.py", "import tokenmill.client.batches.steps"),
        ("tokenmill/client/batches/requests.py", "import tokenmill.client.sync_client"),
        ("tokenmill/client/sync_client.py", "import tokenmill.client.async_client"),
        ("tokenmill/client/replies.py", "import tokenmill.client.errors"),
    ],
    "tokenmill.cli:": [
        ("tokenmill/cli/console.py", "import tokenmill.cli.request_flags"),
        ("tokenmill/cli/service_commands.py", "import tokenmill.cli.task_commands"),
    ],
    "bench:": [("tokenmill/bench/load.py", "import tokenmill.client.sse")],
    "tokenmill.bench:": [
        ("tokenmill/bench/figures.py", "import tokenmill.bench.page"),
        ("tokenmill/bench/prompts.py", "import tokenmill.bench.tables"),
    ],
    "tokenmill.doctor:": [
        ("tokenmill/doctor/finding.py", "import tokenmill.doctor.device"),
        ("tokenmill/doctor/machine.py", "import tokenmill.doctor.examination"),
    ],
    "tokenmill.serve:": [
        ("tokenmill/serve/supervisor.py", "import tokenmill.serve.embedded_redis"),
        ("tokenmill/serve/stopping.py", "import tokenmill.serve.run_record"),
        ("tokenmill/serve/child_processes.py", "import tokenmill.serve.state_directory"),
    ],
    "tokenmill.settings:": [
        ("tokenmill/settings/sources.py", "import tokenmill.settings.declarations"),
        ("tokenmill/settings/setting.py", "import tokenmill.settings.credentials"),
    ],
    "settings:": [
        ("tokenmill/settings/sources.py", "import redis"),
        ("tokenmill/settings/credentials.py", "import worker.errors"),
    ],
    "tokenmill.protocol: the store": [
        ("tokenmill/protocol/records.py", "import tokenmill.protocol.store.task_store"),
        ("tokenmill/protocol/snapshots.py", "import tokenmill.protocol.records"),
        ("tokenmill/protocol/log.py", "import tokenmill.protocol.records"),
        ("tokenmill/protocol/messages.py", "import tokenmill.protocol.log"),
        ("tokenmill/protocol/keys.py", "import tokenmill.protocol.messages"),
    ],
    "engine:": [
        ("engine/scheduling/scheduler.py", "import torch"),
        ("engine/engine.py", "import engine.execution.runner.model_runner"),
        ("engine/scheduling/budget.py", "import redis"),
        ("engine/outputs.py", "import tokenmill.protocol.messages"),
        ("engine/sequence.py", "import prometheus_client"),
    ],
    "engine.offline:": [
        ("engine/offline/llm.py", "import worker.errors"),
        ("engine/offline/progress.py", "import redis"),
    ],
    "execution:": [
        ("engine/execution/runner/model_runner.py", "import monitoring.engine"),
        ("engine/execution/runner/model_runner.py", "import redis"),
    ],
    "monitoring:": [
        ("monitoring/http.py", "import engine.outputs"),
        ("monitoring/worker.py", "import tokenmill.protocol.keys"),
    ],
    "monitoring.engine:": [
        ("monitoring/engine.py", "import engine.scheduling.scheduler"),
        ("monitoring/engine.py", "import tokenmill.protocol.keys"),
    ],
    "monitoring.queue:": [("monitoring/queue.py", "import worker.errors")],
    "worker: from": [
        ("worker/watchdog.py", "import worker.context"),
        ("worker/stream.py", "import worker.output_queue"),
        ("worker/context.py", "import worker.publisher"),
        ("worker/intake.py", "import worker.leases"),
        ("worker/threads.py", "import worker.batch_worker"),
    ],
    "worker.loop:": [
        ("worker/loop.py", "import redis"),
        ("worker/loop.py", "import rq"),
    ],
    "worker: engine": [
        ("worker/loop.py", "import torch"),
        ("worker/loop.py", "import tokenmill.serve.state_directory"),
        ("worker/errors.py", "import flask"),
    ],
    "api: rooms": [
        ("api/routes/tasks.py", "import api.app"),
        ("api/routes/openai/batches.py", "import api.batches.runners"),
        ("api/file_storage.py", "import api.problems"),
        ("api/streams/task_events.py", "import api.routes.tasks"),
        ("api/webhooks/deliverer.py", "import api.streams.sse"),
        ("api/schemas/requests.py", "import api.webhooks.signature"),
        ("api/schemas/openai/chat.py", "import api.tool_calls.parser"),
        ("api/background/reaper.py", "import api.submission"),
        ("api/problems.py", "import api.authentication"),
    ],
    "api.http:": [
        ("api/http/server.py", "import api.streams.sse"),
        ("api/http/connections.py", "import tokenmill.protocol.keys"),
    ],
    "api.tool_calls:": [
        ("api/tool_calls/parser.py", "import api.problems"),
        ("api/tool_calls/formats.py", "import pydantic"),
    ],
    "api:": [
        ("api/app.py", "import engine.engine"),
        ("api/app.py", "import worker.errors"),
        ("api/app.py", "import tokenmill.client"),
        ("api/app.py", "import monitoring.engine"),
        ("api/app.py", "import torch"),
    ],
    "tokenmill:": [
        ("tokenmill/cli/main.py", "import worker.errors"),
        ("tokenmill/serve/service.py", "import api.app"),
        ("tokenmill/cli/console.py", "import rq"),
    ],
    "torch is not even": [("engine/scheduling/scheduler.py", "import engine.execution.runner.model_runner")],
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree that the contracts speak of."""
    directory = tmp_path_factory.mktemp("contracts")
    for room in ROOMS:
        shutil.copytree(ROOT / room, directory / room, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "import_contracts.py", directory / "tests")
    shutil.copy(ROOT / "pyproject.toml", directory)
    return directory


def lint(directory: Path) -> tuple[int, str]:
    """The exit code and output of lint-imports."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def broken_contracts(report: str) -> set[str]:
    return {line.removesuffix(" BROKEN") for line in report.splitlines() if line.endswith(" BROKEN")}


def test_the_contracts_hold(copy: Path) -> None:
    code, report = lint(copy)

    assert code == 0, report
    assert "0 broken" in report


@pytest.mark.parametrize("contract", PLANTS)
def test_a_violation_breaks_its_contract(copy: Path, contract: str) -> None:
    originals = {copy / file: (copy / file).read_text() for file, _ in PLANTS[contract]}
    for file, line in PLANTS[contract]:
        with (copy / file).open("a") as source:
            source.write(f"\n{line}\n")

    code, report = lint(copy)

    for path, text in originals.items():
        path.write_text(text)
    assert code == 1, report
    assert any(name.startswith(contract) for name in broken_contracts(report)), report
    # Each planted line is found, not only the first one.
    for file, line in PLANTS[contract]:
        importer = file.removesuffix(".py").replace("/", ".")
        imported = line.removeprefix("import ").strip()
        assert any(importer in told and imported in told for told in report.splitlines()), (
            file,
            line,
            report,
        )


def test_every_contract_has_a_violation() -> None:
    """A contract that is added without one is not known to work."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [contract["name"] for contract in configuration["tool"]["importlinter"]["contracts"]]

    without = [name for name in names if not any(name.startswith(contract) for contract in PLANTS)]
    assert not without
    assert len(names) == len(PLANTS)
