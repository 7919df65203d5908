"""The parameters of a request that choose its tokens and end its outputs.

This is the one definition of their names, ranges, defaults and descriptions. The HTTP API derives its schema
from it, and the worker builds `SamplingParams` from the JSON of a request.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.errors import InvalidParameter
from engine.structured_outputs import StructuredOutputs
from engine.validation import (
    Boolean,
    Integer,
    Number,
    NumbersByTokenId,
    Rule,
    Texts,
    TokenIds,
    excerpt,
    parameter,
)

GREEDY_BELOW = 1e-4
"""Lower temperatures are greedy: dividing logits by them would overflow float32."""
MAX_N = 128
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint(Rule):
    """A `StructuredOutputs`."""

    def check(self, name: str, value: object) -> None:
        if not isinstance(value, StructuredOutputs):
            raise InvalidParameter(name, "must be an object with one constraint")

    def from_json(self, value: object) -> StructuredOutputs:
        return StructuredOutputs.from_json(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Each field's metadata holds its rule and description. A field whose default is None may be unset.

    Penalties, biases and constraints apply to logits before the temperature. `logprobs` and `prompt_logprobs`
    are those of the model itself, before all of them. `repetition_penalty`: CTRL, arXiv:1909.05858.

    Raises `InvalidParameter`, which names the field.
    """

    n: int = parameter(
        1,
        Integer(minimum=1, maximum=MAX_N),
        "Number of outputs for the prompt. Each has its own seed, derived from `seed` and its index.",
    )
    max_tokens: int | None = parameter(
        None,
        Integer(minimum=1),
        "Maximum number of tokens of an output. Unset: the model's default, or up to the model's length.",
    )
    min_tokens: int = parameter(0, Integer(minimum=0), "Number of tokens before which no output ends.")
    temperature: float = parameter(
        1.0, Number(minimum=0.0), "Divides the logits. 0: always choose the most likely token."
    )
    top_k: int = parameter(0, Integer(minimum=0), "Sample from the k most likely tokens only. 0: from all.")
    top_p: float = parameter(
        1.0,
        Number(minimum=0.0, maximum=1.0, above_minimum=True),
        "Sample from the most likely tokens whose probabilities together reach p.",
    )
    min_p: float = parameter(
        0.0,
        Number(minimum=0.0, maximum=1.0),
        "Drop tokens whose probability is below this share of the most likely token's.",
    )
    seed: int = parameter(
        0,
        Integer(minimum=-(2**63), maximum=2**64 - 1),
        "The same seed produces the same output, whatever other requests run.",
    )
    presence_penalty: float = parameter(
        0.0,
        Number(minimum=-2.0, maximum=2.0),
        "Subtracted from the logit of each token that the output already contains.",
    )
    frequency_penalty: float = parameter(
        0.0,
        Number(minimum=-2.0, maximum=2.0),
        "Subtracted from the logit of each token once for each time that the output contains it.",
    )
    repetition_penalty: float = parameter(
        1.0,
        Number(minimum=0.0, maximum=100.0, above_minimum=True),
        "Divides positive logits, and multiplies negative ones, of each token that the prompt or the output "
        "contains.",
    )
    logit_bias: Mapping[int, float] = parameter(
        {},
        NumbersByTokenId(minimum=-100.0, maximum=100.0, http_max_items=1024),
        "Maps token ids to numbers that are added to their logits.",
    )
    allowed_token_ids: tuple[int, ...] | None = parameter(
        None, TokenIds(allow_empty=False, http_max_items=262_144), "The only token ids that may be chosen."
    )
    bad_words: tuple[str, ...] = parameter(
        (),
        Texts(http_max_items=128, http_max_characters=1024),
        "Texts whose token sequences are never completed.",
    )
    structured_outputs: StructuredOutputs | None = parameter(  # noqa: RUF009 - it returns a dataclass field
        None, Constraint(), "A constraint on the whole text of each output."
    )
    stop: tuple[str, ...] = parameter(
        (),
        Texts(http_max_items=16, http_max_characters=1024, http_accepts_text=True),
        "Texts that end the output. The text that ended it is removed from it.",
    )
    stop_token_ids: tuple[int, ...] = parameter(
        (), TokenIds(http_max_items=1024), "Token ids that end the output. They add no text to it."
    )
    include_stop_str_in_output: bool = parameter(
        False, Boolean(), "Keep the text of `stop` that ended the output."
    )
    ignore_eos: bool = parameter(False, Boolean(), "Continue after the model's end-of-sequence tokens.")
    skip_special_tokens: bool = parameter(True, Boolean(), "Remove special tokens from the text.")
    logprobs: int | None = parameter(
        None,
        Integer(minimum=0, maximum=MAX_LOGPROBS),
        "Return the log-probability of each output token and of this many of the most likely tokens.",
    )
    prompt_logprobs: int | None = parameter(
        None,
        Integer(minimum=0, maximum=MAX_LOGPROBS),
        "Return the same for each token of the prompt except the first.",
    )

    @classmethod
    def from_json(cls, values: object) -> "SamplingParams":
        """The parameters in a JSON object. Members that are null are unset. Raises `InvalidParameter`."""
        if not isinstance(values, Mapping):
            raise InvalidParameter("sampling", "must be an object")
        rules = {field.name: field.metadata["rule"] for field in fields(cls)}
        for name in values:
            if name not in rules:
                raise InvalidParameter(str(name), "is not a sampling parameter of this version")
        members = {name: value for name, value in values.items() if value is not None}
        return cls(**{name: rules[name].from_json(value) for name, value in members.items()})

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                field.metadata["rule"].check(field.name, value)
        check_min_tokens(self.min_tokens, self.max_tokens)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def is_penalized(self) -> bool:
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def for_output(self, *, seed: int, prompt_logprobs: int | None) -> "SamplingParams":
        """A copy with another `seed` and `prompt_logprobs`, without checking any field again."""
        other = copy.copy(self)
        object.__setattr__(other, "seed", seed)
        object.__setattr__(other, "prompt_logprobs", prompt_logprobs)
        return other


def check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    """Raises `InvalidParameter` for `min_tokens`."""
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidParameter("min_tokens", f"must be at most max_tokens ({excerpt(max_tokens)})")
