"""Formats the deltas of a chat completion as chunks or as one reply."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from api.routes.openai.deltas import Delta
from api.tool_calls.parser import CallDelta, TextDelta, ToolCallParser
from api.tool_calls.reading import call_id

NewParser = Callable[[str], ToolCallParser]
"""Creates a parser for a format of tool calls."""


class ChatFormat:
    """`new_parser`: reads the tool calls of one output. `tool_format` returns the model's format of calls.

    `reports_calls`: whether an output with calls ends as `tool_calls`, which one with a named tool does not.
    """

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(
        self,
        task_id: str,
        new_parser: NewParser,
        tool_format: Callable[[], str],
        *,
        reports_calls: bool = True,
    ) -> None:
        self._task_id = task_id
        self._new_parser = new_parser
        self._tool_format = tool_format
        self._reports_calls = reports_calls
        self._outputs: dict[int, _ChatOutput] = {}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks for `delta`, one choice a chunk."""
        choices: list[dict[str, Any]] = []
        output = self._outputs.get(delta.index)
        if output is None:
            output = self._outputs[delta.index] = _ChatOutput(self._new_parser(self._tool_format()))
            choices.append(_choice(delta.index, {"role": "assistant", "content": ""}))
        logprobs = _logprobs(delta.logprobs)
        for part in output.read(delta):
            content = self._delta(delta.index, part)
            choices.append(_choice(delta.index, content, logprobs=logprobs))
            logprobs = None
        if logprobs is not None:
            choices.append(_choice(delta.index, {"content": ""}, logprobs=logprobs))
        if delta.finish_reason is not None:
            reason = self._finish_reason(delta.finish_reason, output)
            choices.append(_choice(delta.index, {}, finish_reason=reason))
        return choices

    def _delta(self, index: int, part: TextDelta | CallDelta) -> dict[str, Any]:
        if isinstance(part, TextDelta):
            return {"content": part.text}
        call: dict[str, Any] = {"index": part.index}
        function = {"arguments": part.arguments}
        if part.name is not None:
            call |= {"id": self._id_of(index, part.index), "type": "function"}
            function = {"name": part.name, **function}
        return {"tool_calls": [{**call, "function": function}]}

    def reply(self, deltas: Iterable[Delta]) -> list[dict[str, Any]]:
        """The choices of the whole reply."""
        outputs: dict[int, _ChatOutput] = {}
        for delta in deltas:
            output = outputs.get(delta.index)
            if output is None:
                output = outputs[delta.index] = _ChatOutput(self._new_parser(self._tool_format()))
            output.add(delta)
        return [self._whole(index, outputs[index]) for index in sorted(outputs)]

    def _whole(self, index: int, output: "_ChatOutput") -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.text or None, "refusal": None}
        calls = [
            {
                "id": self._id_of(index, number),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for number, (name, arguments) in enumerate(output.calls)
        ]
        if calls:
            message["tool_calls"] = calls
        elif not output.text:
            message["content"] = ""
        return {
            "index": index,
            "message": message,
            "logprobs": _logprobs(output.logprobs),
            "finish_reason": self._finish_reason(output.finish_reason, output),
        }

    def _finish_reason(self, reason: str | None, output: "_ChatOutput") -> str | None:
        return "tool_calls" if output.has_calls and self._reports_calls and reason == "stop" else reason

    def _id_of(self, index: int, number: int) -> str:
        return call_id(self._task_id, index, number, self._tool_format())


class _ChatOutput:
    """One output of a chat so far."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self.has_calls = False
        self.logprobs: list[Mapping[str, Any]] = []
        self.finish_reason: str | None = None
        self._texts: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    def read(self, delta: Delta) -> list[TextDelta | CallDelta]:
        """What `delta` adds to the text and to the calls."""
        parts = self._parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts = [*parts, *self._parser.finish()]
        self.has_calls = self.has_calls or any(isinstance(part, CallDelta) for part in parts)
        return parts

    def add(self, delta: Delta) -> None:
        for part in self.read(delta):
            if isinstance(part, TextDelta):
                self._texts.append(part.text)
            elif part.name is not None:
                self._calls.append((part.name, [part.arguments]))
            else:
                self._calls[part.index][1].append(part.arguments)
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Names and arguments."""
        return [(name, "".join(pieces)) for name, pieces in self._calls]


def _choice(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """OpenAI's form; None if none were requested."""
    if not tokens:
        return None
    content = [
        {**_token(token), "top_logprobs": [_token(alternative) for alternative in token["top"]]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"], "bytes": token["bytes"]}
