"""The errors of the service in the words of the command line."""

import click

from tokenmill.cli.task_commands import submit
from tokenmill.client.errors import ClientError, Refused, TooManyRequests

_WORDS = {
    "missing_api_key": "the service asks for an API key; give it with --api-key or TOKENMILL_API_KEY",
    "invalid_api_key": "the service does not know this API key; check --api-key or TOKENMILL_API_KEY",
}


def in_own_words(error: ClientError) -> str:
    """The message, with flags instead of HTTP headers and JSON fields."""
    if error.code in _WORDS:
        return _WORDS[error.code]
    message = error.message
    if isinstance(error, Refused) and error.param and (flag := _flag(error.param)):
        message = message.replace(f"{error.param}:", f"{flag}:", 1)
    if isinstance(error, TooManyRequests) and error.retry_after is not None:
        message = f"{message} (in about {error.retry_after:.0f} s)"
    return message


def _flag(param: str) -> str | None:
    """The flag of `submit` that sets the field `param`, such as `max_tokens` or `stop.0`."""
    name = param.partition(".")[0]
    flags = (each.opts for each in submit.params if isinstance(each, click.Option) and each.name == name)
    return next((max(spellings, key=len) for spellings in flags), None)
