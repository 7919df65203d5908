"""What `tokenmill serve` prints once the service is ready."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_TEXT = """\
Tokenmill is ready at {api_url}; the API is described at {api_url}/docs
  {metrics}
  {command} submit --stream --chat --temperature 0 "What is the capital of France?"
  curl -s {api_url}/v1/tasks{key} -H 'Content-Type: application/json' -d '{body}'"""
_BODY = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
# The key itself is not printed.
_KEY_HEADER = ' -H "Authorization: Bearer $TOKENMILL_API_KEY"'


def announcement(api_url: str, metrics: Sequence[str], *, needs_key: bool) -> list[str]:
    """Lines of text. `metrics`: one line for each worker."""
    return _TEXT.format(
        api_url=api_url,
        metrics="\n  ".join(metrics),
        key=_KEY_HEADER if needs_key else "",
        body=_BODY,
        command=_own_command(),
    ).splitlines()


def _own_command() -> str:
    """How this command can be typed again in this directory."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m tokenmill"
    if shutil.which(program.name) == str(program):
        return program.name
    return shlex.quote(os.path.relpath(program) if program.is_relative_to(Path.cwd()) else str(program))
