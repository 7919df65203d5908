"""The whole reply of a completion, from the deltas of its tasks. Pure functions."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

from api.routes.openai.chat_format import ChatFormat
from api.routes.openai.deltas import Delta
from api.routes.openai.text_format import TextFormat
from api.schemas.openai.chat import ChatCompletionBody
from api.schemas.openai.text import CompletionBody
from api.tool_calls.formats import DEFAULT_FORMAT
from api.tool_calls.reading import CallReading
from tokenmill.protocol.snapshots import TaskSnapshot


class Format(Protocol):
    """Turns deltas into the choices of a route."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def chunks(self, delta: Delta) -> list[dict[str, Any]]: ...
    def reply(self, deltas: list[Delta]) -> list[dict[str, Any]]: ...


def chat_format(body: ChatCompletionBody, task_id: str, tool_format: Callable[[], str]) -> ChatFormat:
    """The format of a chat. `tool_format` returns how the model writes tool calls."""
    tools = body.tool_use
    reading = CallReading(**tools.to_json())
    return ChatFormat(
        task_id,
        lambda tool_format: reading.new_parser(tools.functions, tool_format)(),
        # Read at the first token, not now: a request may be the first one, before a worker is ready.
        cache(tool_format) if tools.tools else lambda: DEFAULT_FORMAT,
        reports_calls=reading.mode != "named",
    )


def text_format(body: CompletionBody) -> TextFormat:
    """The format of a text completion."""
    return TextFormat(_echoed(body), has_logprobs=body.num_logprobs is not None)


def _echoed(body: CompletionBody) -> dict[int, str | list[int]]:
    """The prompts to repeat, by the index of the choice."""
    num_outputs = body.sampling.get("n", 1)
    prompts = [prompt for prompt in body.prompt for _ in range(num_outputs)] if body.echo else []
    return dict(enumerate(prompts))


def common_members(style: Format, first: TaskSnapshot) -> dict[str, Any]:
    """The members that a reply has in common with its chunks. `first`: the first task."""
    return {
        "id": style.id_prefix + first.task_id,
        "created": int(first.accepted_at),
        "model": first.model,
    }


def whole_reply(
    style: Format, common: Mapping[str, Any], deltas: list[Delta], usage: Mapping[str, int]
) -> dict[str, Any]:
    """The reply with the choices of `deltas`."""
    choices = style.reply(deltas)
    return {**common, "object": style.kind, "choices": choices, "usage": usage_view(usage)}


def usage_view(counts: Mapping[str, int]) -> dict[str, Any]:
    """The `usage` of a reply."""
    prompt, completion = counts["prompt_tokens"], counts["completion_tokens"]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": counts["cached_tokens"]},
    }
