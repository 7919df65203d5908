"""Help in sections, completion, `config show`, and `doctor` as a user types it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tokenmill.cli.main import SECTIONS, main
from tokenmill.settings.declarations import ALL

pytestmark = pytest.mark.usefixtures("clean_environment")
COMMANDS = [
    (name, command) for name, command in main.commands.items() if not isinstance(command, click.Group)
] + [("config show", main.commands["config"].commands["show"])]  # type: ignore[attr-defined]


def invoke(*arguments: str, environ: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, arguments, env=environ)


def test_the_help_has_each_command_in_its_section() -> None:
    text = invoke("--help").stdout
    for heading, commands in SECTIONS.items():
        section = text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        assert [line.split()[0] for line in section.splitlines()] == [one.name for one in commands]
    # No summary is cut short.
    assert "..." not in text.partition("\n")[2]


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_each_command_has_examples_that_parse(name: str, command: click.Command) -> None:
    text = invoke(*name.split(), "--help").stdout
    examples = re.findall(rf"tokenmill {name}\b.*", text.partition("Examples:")[2].partition("Options:")[0])
    assert examples
    known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    for example in examples:
        flags = re.findall(r"\s(--?[a-z][a-z-]*)", re.sub(r"\"[^\"]*\"|\|.*|#.*", "", example))
        assert set(flags) <= known, example


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed(shell: str) -> None:
    text = invoke("completion", shell).stdout
    assert "_TOKENMILL_COMPLETE" in text
    assert shell in text


def test_the_script_of_bash_completes_commands_and_flags() -> None:
    def completed(*words: str) -> list[str]:
        done = subprocess.run(
            [Path(sys.executable).with_name("tokenmill")],
            env={
                **os.environ,
                "_TOKENMILL_COMPLETE": "bash_complete",
                "COMP_WORDS": " ".join(("tokenmill", *words)),
                "COMP_CWORD": str(len(words)),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert completed("do") == ["doctor"]
    assert "--goodput" in completed("bench", "--g")


def rows(*arguments: str, environ: dict[str, str] | None = None) -> dict[str, tuple[str, str]]:
    result = invoke("config", "show", "--json", *arguments, environ=environ)
    assert result.exit_code == 0, result.stderr
    return {row["name"]: (row["value"], row["source"]) for row in json.loads(result.stdout)}


def test_each_setting_is_shown_with_its_value_and_source(tmp_path: Path) -> None:
    (tmp_path / "tokenmill.toml").write_text("port = 1\nmax_num_seqs = 2\nhost = '::1'\n")
    found = rows("--port", "3", environ={"TOKENMILL_MAX_NUM_SEQS": "4", "TOKENMILL_PORT": "5"})
    assert set(found) == set(ALL)
    assert found["port"] == ("3", "flag")
    assert found["max_num_seqs"] == ("4", "environment")
    assert found["host"][0] == "::1"
    assert found["host"][1].endswith("tokenmill.toml")
    assert found["block_size"] == ("16", "default")


def test_only_what_is_changed_is_shown_if_asked() -> None:
    assert rows("--changed", "--port", "3") == {"port": ("3", "flag")}
    assert "all settings are at their defaults" in invoke("config", "show", "--changed").stdout


def test_no_secret_is_shown() -> None:
    environ = {
        "TOKENMILL_API_KEYS": "ann:0123456789abcdef0123456789abcdef",
        "TOKENMILL_API_KEY": "0123456789abcdef",
        "REDIS_URL": "redis://user:0123456789abcdef@redis:6379/0",
        "TOKENMILL_WEBHOOK_SECRET": "whsec_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=",
    }
    for arguments in (("--json",), ()):
        text = invoke("config", "show", *arguments, environ=environ).stdout
        assert "0123456789abcdef" not in text
        assert "MDEyMzQ1" not in text
        assert "********" in text
        assert "redis:6379" in text


def test_a_value_that_cannot_be_used_is_an_error() -> None:
    result = invoke("config", "show", "--port", "many")
    assert (result.exit_code, result.stderr.startswith("Error: --port must be a whole number")) == (2, True)


def test_the_doctor_ends_with_1_if_something_failed() -> None:
    result = invoke("doctor", "--redis-url", "redis://127.0.0.1:9/0", "--port", "0", "--metrics-port", "0")
    assert result.exit_code == 1
    assert re.search(r"^fail +redis +no answer from redis://127.0.0.1:9/0", result.stdout, re.MULTILINE)
    assert "-> start the server, or correct REDIS_URL" in result.stdout
    assert "checks failed" in result.stdout


def test_the_doctor_prints_json_and_ends_with_0_if_all_is_well() -> None:
    result = invoke("doctor", "--json", "--port", "0", "--metrics-port", "0")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"]) == (0, True), found
    assert {finding["subject"] for finding in found["findings"]} >= {
        "python", "packages", "settings", "redis", "device", "model", "ports", "disk",
    }  # fmt: skip


def test_the_command_imports_no_torch() -> None:
    code = "import sys, tokenmill.cli.main; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout == "False\n"
