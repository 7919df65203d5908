"""What the commands share that call a running service: its client, and their common arguments."""

import click

from tokenmill.cli.service_commands import load_settings, state_of
from tokenmill.client.sync_client import Client
from tokenmill.settings.declarations import ClientCommandSettings
from tokenmill.settings.errors import SettingError

json_flag = click.option("--json", "as_json", is_flag=True, help="print JSON")


def address_of(url: str | None, api_key: str | None, config_file: str | None) -> tuple[str, str | None]:
    """The configured address, else that of the service that runs in this directory; and the API key."""
    settings = load_settings(ClientCommandSettings, {"url": url, "api_key": api_key}, config_file)
    address = settings.url or state_of(settings).address("api-url")
    return address or f"http://{settings.host}:{settings.port}", settings.api_key


def client_of(url: str | None, api_key: str | None, config_file: str | None) -> Client:
    """A client of the configured address, else of the service that runs in this directory."""
    address, key = address_of(url, api_key, config_file)
    try:
        # A person decides whether to try again.
        return Client(address, key, max_retries=0)
    except ValueError as error:
        raise SettingError(str(error)) from None


def check_id(task_id: str) -> str:
    """Refuse an empty id, as from an unset shell variable, and one with a slash: both change the path."""
    if not task_id.strip() or "/" in task_id:
        raise click.UsageError(f"{task_id!r} is not the id of a task")
    return task_id


id_argument = click.argument(
    "task_id", metavar="ID", callback=lambda _context, _parameter, value: check_id(value)
)
