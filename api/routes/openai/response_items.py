"""The output items of a response, and the events that announce them. No I/O.

Invariant: both depend on the text and its division into events alone, so a stream that is read again has the
same events.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from api.tool_calls.parser import CallDelta, TextDelta, ToolCallParser
from api.tool_calls.reading import call_id

Event = dict[str, Any]
"""An event without its sequence number."""
Status = str


class OutputItems:
    """Messages and function calls, in the order of the text. `tool_format`: decides the ids of calls.

    The last item is open: its status is `in_progress` until the next one begins or the output ends.
    """

    def __init__(self, task_id: str, parser: ToolCallParser, tool_format: str) -> None:
        self._task_id = task_id
        self._parser = parser
        self._tool_format = tool_format
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[Mapping[str, Any]] = []

    @property
    def items(self) -> list[dict[str, Any]]:
        """All items so far."""
        if self._open is not None:
            self._complete(self._open)
        return self._items

    def feed(self, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> Iterator[Event]:
        """The events for more of the text. `logprobs`: of its tokens, as the worker publishes them."""
        self._logprobs += logprobs
        for part in self._parser.feed(text) if text else ():
            yield from self._add(part)

    def finish(self, status: Status) -> Iterator[Event]:
        """The events for the end of the output. `status`: `completed` or `incomplete`, of the last item."""
        for part in self._parser.finish():
            yield from self._add(part)
        if not self._items:
            yield from self._open_message()
        yield from self._close(status)

    def _add(self, part: TextDelta | CallDelta) -> Iterator[Event]:
        if isinstance(part, TextDelta):
            if self._open is None or self._open["type"] != "message":
                yield from self._close("completed")
                yield from self._open_message()
            yield self._text_delta(part.text)
            return
        if part.name is not None:
            yield from self._close("completed")
            yield self._open_call(part.index, part.name)
        # The tokens of a call have no place for their log-probabilities.
        self._logprobs = []
        if part.arguments:
            self._pieces.append(part.arguments)
            place = self._place()
            yield {"type": "response.function_call_arguments.delta", **place, "delta": part.arguments}

    def _text_delta(self, text: str) -> Event:
        assert self._open is not None, "a message is open"
        self._pieces.append(text)
        logprobs = [_logprob(token) for token in self._logprobs]
        self._logprobs = []
        self._open["content"][0]["logprobs"] += logprobs
        place = {**self._place(), "content_index": 0}
        return {"type": "response.output_text.delta", **place, "delta": text, "logprobs": logprobs}

    def _open_message(self) -> Iterator[Event]:
        number = sum(item["type"] == "message" for item in self._items)
        suffix = f"_{number}" if number else ""
        item: dict[str, Any] = {
            "id": f"msg_{self._task_id}{suffix}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        yield self._added(item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["content"] = [part]
        event = {"type": "response.content_part.added", **self._place(), "content_index": 0}
        yield {**event, "part": {**part, "logprobs": []}}

    def _open_call(self, number: int, name: str) -> Event:
        return self._added(
            {
                "id": f"fc_{self._task_id}_{number}",
                "type": "function_call",
                "status": "in_progress",
                "call_id": call_id(self._task_id, 0, number, self._tool_format),
                "name": name,
                "arguments": "",
            }
        )

    def _added(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        self._open = item
        index = len(self._items) - 1
        return {"type": "response.output_item.added", "output_index": index, "item": dict(item)}

    def _close(self, status: Status) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        self._complete(item)
        item["status"] = status
        place = self._place()
        if item["type"] == "message":
            (part,) = item["content"]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield {"type": "response.output_text.done", **place, "content_index": 0, **text}
            yield {"type": "response.content_part.done", **place, "content_index": 0, "part": part}
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        yield {
            "type": "response.output_item.done",
            "output_index": place["output_index"],
            "item": item,
        }
        self._open = None

    def _complete(self, item: dict[str, Any]) -> None:
        """Write the pieces so far into the open item. Joined late: adding each one would copy the text."""
        holder, name = (item["content"][0], "text") if item["type"] == "message" else (item, "arguments")
        holder[name] += "".join(self._pieces)
        self._pieces = []

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}


def _logprob(token: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's form."""
    return {
        **_token(token),
        "top_logprobs": [_token(alternative) for alternative in token["top"]],
    }


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"], "bytes": token["bytes"]}
