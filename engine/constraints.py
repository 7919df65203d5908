"""Constraints of a sequence in token ids, resolved from its sampling parameters when it is added."""

from dataclasses import dataclass
from typing import Any, Protocol


class Grammar(Protocol):
    """The state of the grammar that the text of one output must match.

    The state depends only on the output's tokens.
    """

    def advance(self, token_ids: list[int]) -> None:
        """Advance to the end of `token_ids`, which are all output tokens so far.

        Raises ValueError if a token is not allowed.
        """
        ...

    def fill_bitmask(self, row: Any) -> None:
        """Write the mask of allowed next tokens into `row`, int32 [ceil(vocabulary / 32)]: bit `i % 32` of
        word `i // 32` is set if token `i` is allowed.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete, so that only an end token is allowed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Token ids that end or limit the output.

    `end_token_ids`: tokens that end the output and add no text: end-of-sequence tokens unless ignored, stop
    token ids, and stop strings that are special tokens. `bad_token_ids`: token sequences that must not occur.
    `grammar`: None if the text is unconstrained.
    """

    end_token_ids: frozenset[int] = frozenset()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


NO_TOKEN_ALLOWED = "no token is allowed: penalties, masks and grammar leave none"  # noqa: S105 - no secret
"""Error of a request whose constraints forbid every token."""

FREE = Constraints()
"""No constraints: only the length ends the output."""
