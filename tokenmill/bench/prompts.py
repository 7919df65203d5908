"""The requests of a load: synthetic prompts of given lengths, or prompts from a file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had"
    " an they which one you were her all she there would their we him been has when who will more no if"
    " out so said what up its about into than them can only other new some could time these two may then"
    " do first any my now such like our over man me even most made after also did many before must through"
    " back years where much your way well down should because each just those people how too little state"
    " good very make world still own see men work long get here between both life being under never day"
    " same another know while last might us great old year off come since against go came right used take"
    " three"
)
_WORDS = _TEXT.split()
"""Words that are one token in most vocabularies."""


class UnusablePrompts(Exception):
    """The file of prompts cannot be read or has a line without a prompt."""


class Lengths(NamedTuple):
    """A range of tokens; each length in it is equally likely."""

    minimum: int
    maximum: int

    def draw(self, random: Random) -> int:
        return random.randint(self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt`: text, or the messages of a chat."""

    prompt: str | list[dict[str, Any]]
    max_tokens: int


def synthetic(*, seed: int, input_lengths: Lengths, output_lengths: Lengths) -> Iterator[Request]:
    """Endless requests with prompts of random words, about one token each.

    A seed always gives the same requests. Prompts do not begin alike, so that no prefix cache serves them.
    """
    random = Random(f"requests {seed}")  # noqa: S311 - a load, not a secret
    while True:
        words = random.choices(_WORDS, k=input_lengths.draw(random))
        yield Request(" ".join(words), output_lengths.draw(random))


def from_file(path: Path, *, max_tokens: int) -> Iterator[Request]:
    """The prompts of the file, over and over: lines of text, or of JSON with `prompt` or `messages`.

    `max_tokens`: for lines that have none. Raises `UnusablePrompts`.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UnusablePrompts(f"{path} cannot be read: {error}") from None
    requests = [
        _request(line, f"{path}, line {number}", max_tokens)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not requests:
        raise UnusablePrompts(f"{path} has no prompt")
    return cycle(requests)


def _request(line: str, where: str, max_tokens: int) -> Request:
    if not line.lstrip().startswith("{"):
        return Request(line, max_tokens)
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise UnusablePrompts(f"{where} is not JSON: {error}") from None
    prompt, limit = fields.get("messages", fields.get("prompt")), fields.get("max_tokens", max_tokens)
    if not isinstance(prompt, str | list) or not prompt:
        raise UnusablePrompts(f'{where} has neither "prompt" nor "messages"')
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise UnusablePrompts(f'{where}: "max_tokens" is not a positive number')
    return Request(prompt, limit)
