"""`tokenmill chat`: a conversation in the terminal. Each answer is a task."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from tokenmill.cli.connection import client_of
from tokenmill.cli.service_commands import setting_flags
from tokenmill.cli.task_output import TaskNotCompleted, check_end
from tokenmill.cli.text_streams import read_standard_input, write_stderr, write_stdout
from tokenmill.client.errors import ClientError, NotAuthenticated, Refused
from tokenmill.client.sync_client import Client, Task
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.settings.declarations import ClientSettings

HELP = """/help            this list
/system TEXT     set the system prompt; without TEXT, remove it
/set NAME VALUE  set a parameter of the requests, such as temperature 0.5
/params          show the parameters
/reset           forget the conversation
/save FILE       write the conversation as JSON
/quit            leave, as Ctrl-D does. Ctrl-C stops an answer."""


@click.command()
@click.option("--system", help="system prompt")
@click.option("--max-tokens", type=int, help="maximum number of tokens of an answer")
@click.option("--temperature", type=float, help="0 always chooses the most likely token")
@click.option("--seed", type=int, help="the same seed produces the same answers")
@click.option("--model", help="refuse to run on another model than this one (its public name)")
@setting_flags(ClientSettings)
# Each option is a parameter: click passes them by name.
def chat(
    system: str | None, config_file: str | None, url: str | None, api_key: str | None, **parameters: Any
) -> None:
    """Talk to the model. /help lists the commands.

    Without a terminal each line of standard input is a message. An answer survives a restart of the service.

    \b
    Examples:
      tokenmill chat
      tokenmill chat --system "Answer in French." --temperature 0
      echo "What is the capital of France?" | tokenmill chat
    """
    with client_of(url, api_key, config_file) as client:
        chatting = Chat(
            client, system, {name: value for name, value in parameters.items() if value is not None}
        )
        for message in _terminal_lines() if sys.stdin.isatty() else _piped_lines():
            if chatting.handle(message):
                return


class Chat:
    """The conversation so far, and the parameters of the next request."""

    def __init__(self, client: Client, system: str | None, parameters: dict[str, Any]) -> None:
        self._client = client
        self._system = system
        self._parameters = parameters
        self._messages: list[dict[str, str]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: write_stderr(HELP),
            "/system": self._set_system,
            "/set": self._set,
            "/params": lambda _: write_stderr(json.dumps({"system": self._system, **self._parameters})),
            "/reset": lambda _: self._messages.clear(),
            "/save": self._save,
        }

    def handle(self, line: str) -> bool:
        """Answer a message or obey a command. Returns whether the user leaves. Raises `ClientError` for a
        service that cannot be reached.
        """
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            return True
        if command := self._commands.get(word):
            command(rest.strip())
        elif word.startswith("/"):
            write_stderr(f"{word} is not a command; /help lists them")
        elif word:
            self._answer(line.strip())
        return False

    def _answer(self, message: str) -> None:
        """An answer that fails is not part of the conversation. One that is stopped is, as far as it came."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        messages = [*self._messages, {"role": "user", "content": message}]
        fields: dict[str, Any] = {"messages": [*system, *messages], **self._parameters}
        try:
            text = self._follow(self._client.submit(**fields))
        except NotAuthenticated:
            # No other message would be accepted either.
            raise
        except (Refused, TaskNotCompleted) as error:
            write_stderr(f"Error: {error}")
            return
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _follow(self, task: Task) -> str:
        """Print the answer while it is generated. Raises `TaskNotCompleted`."""
        text = ""
        try:
            for event in task.stream():
                text += event.text
                write_stdout(event.text, end="")
                if isinstance(event, FinishedEvent):
                    check_end(event.finish_reason, event.error)
        except KeyboardInterrupt:
            with suppress(ClientError):
                task.cancel()
            write_stderr(" (stopped)")
        finally:
            write_stdout("")
        return text

    def _set_system(self, text: str) -> None:
        self._system = text or None

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not value:
            write_stderr("use /set NAME VALUE, such as /set temperature 0.5")
            return
        with suppress(ValueError):
            value = json.loads(value)
        # The service checks the name and the value.
        self._parameters[name] = value

    def _save(self, name: str) -> None:
        try:
            Path(name).write_text(json.dumps(self._messages, ensure_ascii=False, indent=2) + "\n", "utf-8")
        except OSError as error:
            write_stderr(f"{name or 'the file'} cannot be written: {error.strerror}")


def _terminal_lines() -> Iterator[str]:
    """Lines with history and editing, until Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401 - it changes how `input` reads
    write_stderr("Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands.")
    while True:
        try:
            yield input("> ")
        except EOFError:
            write_stderr("")
            return
        except KeyboardInterrupt:
            write_stderr("")


def _piped_lines() -> Iterator[str]:
    yield from read_standard_input().splitlines()
