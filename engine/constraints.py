"""What a request's parameters come to once tokenizer and model are known: decided when it is added."""

from dataclasses import dataclass
from typing import Any, Protocol


class Grammar(Protocol):
    """One output's place in the grammar that its whole text must match.

    Derived from the output's tokens alone: a new one that is shown the same tokens stands at the same place.
    """

    def advance(self, token_ids: list[int]) -> None:
        """Show it all output tokens so far; it takes those that it has not seen. Raises ValueError."""
        ...

    def fill_bitmask(self, row: Any) -> None:
        """Write which tokens may come next into `row`, int32 [ceil(vocabulary / 32)]: bit `i % 32` of word
        `i // 32` says it of token `i`.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Token ids in the place of texts.

    `end_token_ids`: all that end the output and leave no text: the model's own unless ignored, the request's
    stop tokens, and stop strings that are special tokens. `bad_token_ids`: sequences of ids that must not
    come in this order. `grammar`: None where the text is free.
    """

    end_token_ids: frozenset[int] = frozenset()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None


NO_TOKEN_ALLOWED = "no token is allowed: penalties, masks and grammar leave none"  # noqa: S105 - no secret
"""What a request is told that forbids every token."""

FREE = Constraints()
"""Nothing ends the output but its length."""
