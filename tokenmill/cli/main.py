"""The `tokenmill` command: starts the service and its parts, submits tasks and reads them.

An expected error is one line that says what to do, with an exit code of its own. A traceback is a bug.
"""

from typing import Any

import click

from tokenmill.cli.batch_command import batch
from tokenmill.cli.bench_command import bench
from tokenmill.cli.cancel_command import cancel
from tokenmill.cli.chat_command import chat
from tokenmill.cli.completion_command import completion
from tokenmill.cli.config_command import config
from tokenmill.cli.console import use_colour
from tokenmill.cli.distributions import conflict, installed
from tokenmill.cli.doctor_command import doctor
from tokenmill.cli.error_words import in_own_words
from tokenmill.cli.list_command import list_tasks
from tokenmill.cli.service_commands import api, serve, worker
from tokenmill.cli.task_commands import status, submit
from tokenmill.cli.task_output import TaskNotCompleted
from tokenmill.cli.text_streams import CannotWrite, check_argument, prepare_standard_streams, write_stderr
from tokenmill.cli.top_command import top
from tokenmill.cli.watch_command import watch
from tokenmill.client.errors import ClientError, Refused
from tokenmill.serve.embedded_redis import RedisUnavailable
from tokenmill.serve.errors import CannotServe
from tokenmill.settings.errors import SettingError

FAILED, MISUSED, REFUSED, UNREACHABLE, INTERRUPTED = 1, 2, 3, 4, 130
"""Exit codes."""

_VERSIONS = installed()
_EXPECTED = (SettingError, ClientError, RedisUnavailable, CannotServe, CannotWrite, TaskNotCompleted)

_EPILOG = """\b
Exit codes:
  0    done
  1    the task failed or was cancelled; serve: the service did not stay up
  2    wrong usage or a wrong setting
  3    the service refused the request
  4    the service or the Redis server cannot be reached
  130  interrupted

\b
Settings come from flags, then environment variables (--max-num-seqs is
TOKENMILL_MAX_NUM_SEQS), then tokenmill.toml in the current directory or the
file that --config names (max_num_seqs = 32).
"""


SECTIONS: dict[str, dict[click.Command, str]] = {
    "Run the service": {
        serve: "Run everything: Redis, the API and the workers.",
        worker: "Run one worker alone.",
        api: "Run the API alone.",
    },
    "Use it": {
        submit: "Submit a task; print its id, or wait for its text.",
        status: "Show a task.",
        watch: "Follow a task until it has ended.",
        list_tasks: "List tasks, newest first.",
        cancel: "Cancel a task, or all.",
        chat: "Talk to the model.",
        batch: "Run all requests of a file.",
        top: "Show queue, workers and tasks, refreshed.",
    },
    "Measure and mend": {
        bench: "Measure a server under load.",
        doctor: "Check what the service needs, and say how to mend it.",
        config: "Show the settings and where they come from.",
    },
    "Other": {completion: "Print the completion script of a shell."},
}
"""Headings of the help, and the commands below each."""


class _Group(click.Group):
    """Prints an expected error as one line and exits with its code. Its help has headings."""

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - the signature of the base class
        formatter: click.HelpFormatter,
    ) -> None:
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(one.name or "", summary) for one, summary in commands.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        prepare_standard_streams()
        for argument in args:
            check_argument(argument)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (
            SettingError,
            ClientError,
            RedisUnavailable,
            CannotServe,
            CannotWrite,
            TaskNotCompleted,
        ) as error:
            message = in_own_words(error) if isinstance(error, ClientError) else str(error)
            click.echo(f"Error: {message}", err=True)
            ctx.exit(_exit_code(error))


def _exit_code(error: Exception) -> int:
    if isinstance(error, SettingError):
        return MISUSED
    if isinstance(error, Refused):
        return REFUSED
    if isinstance(error, ClientError | RedisUnavailable):
        return UNREACHABLE
    return FAILED


@click.group(
    cls=_Group,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(next(iter(_VERSIONS.values()), "unknown"), prog_name="tokenmill")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Run a task-queue service for LLM inference, and use it.

    \b
    Examples:
      tokenmill serve
      tokenmill submit --stream --chat --temperature 0 "What is the capital of France?"
      tokenmill status ID
    """
    ctx.color = use_colour()
    if warning := conflict(_VERSIONS):
        write_stderr(f"Warning: {warning}")


for command in (command for commands in SECTIONS.values() for command in commands):
    main.add_command(command)
