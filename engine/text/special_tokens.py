"""Finds special tokens in a text, and encodes a text in which only some of them are special."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

Span = tuple[int, int]
"""Start and end in a text, in characters."""


def new_mark() -> str:
    """A secret marker: eight random private-use characters, without case or white space."""
    return "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(8))


class SpecialTexts:
    """Finds a tokenizer's special tokens in a text as the tokenizer does: leftmost, then longest."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._pattern = re.compile(_pattern(texts)) if texts else None
        #: Each special token contains at least one of these.
        self.marker_characters = frozenset(one for text in texts for one in _marker_characters(text))
        self.proper_prefixes = tuple({text[:end] for text in texts for end in range(1, len(text))})
        self.proper_suffixes = tuple({text[start:] for text in texts for start in range(1, len(text))})

    def find(self, text: str) -> list[Span]:
        return [match.span() for match in self._pattern.finditer(text)] if self._pattern else []

    def may_occur(self, text: str) -> bool:
        """Whether `text` may be a part of a special token or contain one: it has a marker character."""
        return not self.marker_characters.isdisjoint(text)


class SelectiveEncoder:
    """Encodes texts in which special tokens are special at given positions only.

    `specials`: the special tokens by id. A copy of the tokenizer reads them as plain text and knows each by a
    second, secret text, which replaces it where it is special. The copy takes as much memory as the original.
    """

    def __init__(self, backend: Any, specials: Mapping[int, Any]) -> None:
        self._copy = type(backend).from_str(backend.to_str())
        self._copy.encode_special_tokens = True
        self._marks = {token.content: new_mark() for token in specials.values()}
        self._copy.add_tokens([_marked(token, self._marks[token.content]) for token in specials.values()])
        self._originals = {
            self._copy.token_to_id(self._marks[token.content]): token_id
            for token_id, token in specials.items()
        }

    def encode(self, text: str, special: Sequence[Span]) -> list[int]:
        """The ids of `text`, in which only the special tokens at `special` are special."""
        pieces: list[str] = []
        end = 0
        for start, stop in special:
            pieces += text[end:start], self._marks[text[start:stop]]
            end = stop
        pieces.append(text[end:])
        ids = self._copy.encode_batch_fast(["".join(pieces)], add_special_tokens=False)[0].ids
        return [self._originals.get(one, one) for one in ids]


def _marked(token: Any, mark: str) -> Any:
    """`mark` as an added token with the options of `token`."""
    return type(token)(
        mark,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=False,
    )


def _marker_characters(text: str) -> set[str]:
    """Characters of a special token that are no letter, digit, space or `_`; without any, its first one."""
    found = {
        character
        for character in text
        if not (character.isalnum() or character.isspace() or character == "_")
    }
    return found or set(text[:1])


def _pattern(texts: Sequence[str]) -> str:
    """A regular expression for `texts` that tests each character once at each position."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _alternatives(tree)


def _alternatives(tree: Mapping[str, Any]) -> str:
    """Longest first: "", the end of a text, is the last alternative."""
    chain = ""
    while len(tree) == 1:
        character, tree = next(iter(tree.items()))
        if not character:
            return chain
        chain += re.escape(character)
    branches = [re.escape(one) + _alternatives(inner) for one, inner in tree.items() if one]
    return f"{chain}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"
