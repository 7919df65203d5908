"""What a user may ask of the choice of each next token, checked where it is made."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import InvalidParameter

GREEDY_BELOW = 1e-4
"""Temperatures under this choose the most likely token: dividing by less overflows float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    `max_tokens`: at most so many output tokens; None: up to the model's length. `temperature`: 0 is greedy.
    `top_k`: 0 keeps all. `top_p`, `min_p`: shares of probability. `seed`: 64 bits; one seed gives one text,
    whatever runs beside it. `stop`: strings that end the text and are cut from it. `stop_token_ids`: ids that
    end it and leave no text. `ignore_eos`: the model's own end is not an end.

    Raises `InvalidParameter`, which names the field.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, least=1)
        _number("temperature", self.temperature, 0.0, math.inf)
        _whole("top_k", self.top_k, least=0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidParameter("top_p", "must be above 0")
        _number("min_p", self.min_p, 0.0, 1.0)
        _whole("seed", self.seed, least=-(2**63), most=2**64 - 1)
        _strings("stop", self.stop)
        for token_id in _items("stop_token_ids", self.stop_token_ids):
            _whole("stop_token_ids", token_id, least=0)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParameter("ignore_eos", "must be true or false")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _whole(field: str, value: object, *, least: int, most: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameter(field, f"must be a whole number, not {value!r:.40}")
    if value < least or (most is not None and value > most):
        raise InvalidParameter(field, f"must be at least {least}" + (f" and at most {most}" if most else ""))


def _number(field: str, value: object, least: float, most: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise InvalidParameter(field, f"must be a number, not {value!r:.40}")
    try:
        # NaN compares false with everything, so the range alone would let it through.
        is_good = math.isfinite(value) and least <= value <= most
    except OverflowError:  # a whole number that no float holds
        is_good = False
    if not is_good:
        raise InvalidParameter(field, f"must be a finite number from {least} to {most}, not {value!r:.40}")


def _items(field: str, value: object) -> Iterable[object]:
    if not isinstance(value, (tuple, list)):
        raise InvalidParameter(field, "must be a list")
    return value


def _strings(field: str, value: object) -> None:
    for item in _items(field, value):
        if not isinstance(item, str) or not item:
            raise InvalidParameter(field, "must be a list of strings that are not empty")
