"""Renders chats with a model's template and finds the special tokens that the template itself wrote.

The text of a special token inside a message, or across its edge, is never special: a client cannot forge a
turn. Rendering the messages with secret marks shows where the template puts their contents:

1. Marks around each string. If the text without the marks is unchanged, everything between two marks is
   content. This works for templates that copy contents, trim them or put them into JSON.
2. Marks inside each special token, and at edges that could form one with their neighbours. This works for
   templates that test the beginning of a content or cut it.
3. Otherwise the characters of special tokens are replaced in the messages. If the rendered text has as many
   special tokens as before, none comes from the messages; if not, the messages are refused.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from engine.errors import InvalidParameter
from engine.text.special_tokens import Span, SpecialTexts, new_mark

Render = Callable[[Any], str]
"""Renders a chat: a JSON value of any shape, such as a list of messages."""


class ChatTemplate:
    """`render`: applies the model's template. `specials`: its tokenizer's special tokens."""

    def __init__(self, render: Render, specials: SpecialTexts) -> None:
        self._apply = render
        self._specials = specials
        self._open, self._close, self._break = marks = [new_mark() for _ in range(3)]
        self._marks = re.compile(f"({'|'.join(marks)})")

    def render(self, chat: Any) -> str:
        """The text of a chat. Raises `InvalidParameter` if the template refuses the messages."""
        try:
            return self._apply(chat)
        except Exception as error:
            # A template is a program that comes with the model: it may raise anything.
            raise InvalidParameter("messages", f"the model's chat template refuses them: {error}") from error

    def own_specials(self, chat: Any, text: str) -> list[Span] | None:
        """The special tokens of the template in `text`, the rendered `chat`; None: all of them.

        Raises `InvalidParameter` if they cannot be distinguished.
        """
        if not any(self._specials.may_occur(one) for one in _strings(chat)):
            return None
        found = self._specials.find(text)
        for mark in (self._around, self._inside):
            contents = self._contents(_mapped(chat, mark), text)
            if contents is not None:
                own = [span for span in found if not _touches(span, contents)]
                return None if len(own) == len(found) else own
        neutral = self._try(_mapped(chat, self._neutral))
        if neutral is not None and len(self._specials.find(neutral)) == len(found):
            return None
        raise InvalidParameter(
            "messages",
            "they have the text of a special token, and the model's chat template changes them so that it "
            "cannot be distinguished from the template's own; leave it out",
        )

    def _try(self, messages: Any) -> str | None:
        try:
            return self._apply(messages)
        except Exception:  # noqa: BLE001 - a template may raise anything at unexpected contents
            return None

    def _contents(self, marked_messages: Any, text: str) -> list[Span] | None:
        """The contents in `text`; None if the marks changed the text or are lost."""
        marked = self._try(marked_messages)
        return None if marked is None else self._read_marks(marked, text)

    def _read_marks(self, marked: str, text: str) -> list[Span] | None:
        pieces = self._marks.split(marked)
        if "".join(pieces[::2]) != text:
            return None
        spans: list[Span] = []
        position, start = 0, None
        for piece, mark in zip(pieces[::2], pieces[1::2], strict=False):
            position += len(piece)
            if mark == self._break:
                spans.append((position, position))
            elif (mark == self._open) is not (start is None):
                return None
            elif start is None:
                start = position
            else:
                spans.append((start, position))
                start = None
        return spans if start is None else None

    def _around(self, text: str) -> str:
        core = text.strip()
        if not core or not self._specials.may_occur(core):
            return text
        start = text.index(core)
        return f"{text[:start]}{self._open}{core}{self._close}{text[start + len(core) :]}"

    def _inside(self, text: str) -> str:
        core = text.strip()
        if not core or not self._specials.may_occur(core):
            return text
        start = text.index(core)
        pieces, end = list[str](), 0
        for first, _ in self._specials.find(core):
            pieces.append(core[end : first + 1])
            end = first + 1
        marked = self._break.join([*pieces, core[end:]])
        before = self._break if core.startswith(self._specials.proper_suffixes) else ""
        after = self._break if core.endswith(self._specials.proper_prefixes) else ""
        return f"{text[:start]}{before}{marked}{after}{text[start + len(core) :]}"

    def _neutral(self, text: str) -> str:
        markers = self._specials.marker_characters
        return "".join("x" if character in markers else character for character in text)


def _touches(span: Span, contents: list[Span]) -> bool:
    """Whether `span` overlaps one of `contents`, which are in order, or encloses an empty one."""
    before = bisect_left(contents, (span[1],)) - 1
    return before >= 0 and contents[before][1] > span[0]


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with all strings changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(name, change): _mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(inner, change) for inner in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(name)
            yield from _strings(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _strings(inner)
