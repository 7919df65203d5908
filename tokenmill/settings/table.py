"""Writes the tables of `docs/settings.md`: `python -m tokenmill.settings.table > docs/settings.md`."""

from tokenmill.settings.declarations import ALL, ApiSettings, ClientSettings, WorkerSettings
from tokenmill.settings.setting import Purpose, Setting
from tokenmill.settings.sources import Settings

_HEAD = """\
# Settings

<!-- Written by `python -m tokenmill.settings.table`; a test compares it with the code. -->

Every setting has one name. `max_num_seqs`, for example, is

- the flag `--max-num-seqs` of `tokenmill serve` and of the command of its process,
- the environment variable `TOKENMILL_MAX_NUM_SEQS`,
- the key `max_num_seqs` of `tokenmill.toml` in the current directory, or of the file that `--config` names.

A flag takes precedence over the environment, and the environment over the file. An empty variable is not set.
A value that cannot be used is reported before anything starts, with exit code 2; `python -m worker` and
`python -m api`, which the containers run, exit with 78. A variable `TOKENMILL_...` that is not listed here is
reported and ignored.
"""
_READERS: dict[str, type[Settings]] = {
    "API": ApiSettings,
    "worker": WorkerSettings,
    "client commands": ClientSettings,
}


def settings_page() -> str:
    """The page of the documentation."""
    return "\n".join([_HEAD, *(_section(purpose) for purpose in Purpose)])


def _section(purpose: Purpose) -> str:
    rows = [_row(one) for one in ALL.values() if one.purpose is purpose]
    head = ["| variable | default | values | meaning | read by |", "|---|---|---|---|---|"]
    return "\n".join([f"## {purpose.value}", "", *head, *rows, ""])


def _row(setting: Setting) -> str:
    readers = [name for name, each in _READERS.items() if setting.name in each.model_fields]
    cells = [
        f"`{setting.variable}`",
        setting.shown_default,
        _values(setting),
        setting.help_text,
        ", ".join(readers) or "`serve`",
    ]
    return f"| {' | '.join(cells)} |"


def _values(setting: Setting) -> str:
    if setting.words:
        return ", ".join(f"`{word}`" for word in setting.words)
    return (
        ""
        if setting.kind is str
        else setting.allowed.removeprefix("a whole number ").removeprefix("a number ").removeprefix("of ")
    )


if __name__ == "__main__":
    print(settings_page(), end="")  # noqa: T201 - its output
