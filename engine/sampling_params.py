"""What a user may ask of the choice of each next token, checked where it is made."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.errors import InvalidParameter
from engine.structured_outputs import StructuredOutputs
from engine.validation import boolean, number, numbers_by_token_id, strings, token_ids, whole

GREEDY_BELOW = 1e-4
"""Temperatures under this choose the most likely token: dividing by less overflows float32."""
MAX_N = 128
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_REPETITION_PENALTY = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    `n`: outputs of one request; each has a seed of its own, made of `seed` and its index. `max_tokens`: at
    most so many output tokens; None: up to the model's length. `min_tokens`: nothing ends the output before.
    `temperature`: 0 is greedy. `top_k`: 0 keeps all. `top_p`, `min_p`: shares of probability. `seed`: 64
    bits; one seed gives one text, whatever runs beside it.

    `presence_penalty`, `frequency_penalty`: taken off the logits of output tokens, once or as often as they
    stand there (OpenAI). `repetition_penalty`: divides (where negative: multiplies) the logits of prompt and
    output tokens (CTRL, arXiv:1909.05858; transformers). `logit_bias`: added to the logits of these ids.
    `allowed_token_ids`: no others are chosen. `bad_words`: texts whose tokens are not chosen in this order.
    `structured_outputs`: what the whole text must look like.

    `stop`: strings that end the text; they are cut from it unless `include_stop_str_in_output`.
    `stop_token_ids`: ids that end it and leave no text. `ignore_eos`: the model's own end is not an end.
    `skip_special_tokens`: special tokens leave no text. `logprobs`: of each output token, and of so many of
    the likeliest beside it; None: not told. `prompt_logprobs`: the same of each prompt token but the first.
    Both are the model's own, before penalties and temperature.

    Raises `InvalidParameter`, which names the field.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_shape()
        self._check_penalties()
        self._check_constraints()
        self._check_ends()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), least=0, most=MAX_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def for_output(self, *, seed: int, prompt_logprobs: int | None) -> "SamplingParams":
        """The same but for `seed` and `prompt_logprobs`, which are not checked, nor is the rest again."""
        other = copy.copy(self)
        object.__setattr__(other, "seed", seed)
        object.__setattr__(other, "prompt_logprobs", prompt_logprobs)
        return other

    def _check_lengths(self) -> None:
        whole("n", self.n, least=1, most=MAX_N)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, least=1)
        whole("min_tokens", self.min_tokens, least=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"must be at most max_tokens ({self.max_tokens})")

    def _check_shape(self) -> None:
        number("temperature", self.temperature, 0.0, math.inf)
        whole("top_k", self.top_k, least=0)
        number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidParameter("top_p", "must be above 0")
        number("min_p", self.min_p, 0.0, 1.0)
        whole("seed", self.seed, least=-(2**63), most=2**64 - 1)

    def _check_penalties(self) -> None:
        number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        number("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY)
        if self.repetition_penalty == 0:
            raise InvalidParameter("repetition_penalty", "must be above 0")

    def _check_constraints(self) -> None:
        numbers_by_token_id("logit_bias", self.logit_bias, -MAX_BIAS, MAX_BIAS)
        if self.allowed_token_ids is not None:
            token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidParameter("allowed_token_ids", "must have at least one id")
        strings("bad_words", self.bad_words)
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            raise InvalidParameter("structured_outputs", "must be an object with one constraint")

    def _check_ends(self) -> None:
        strings("stop", self.stop)
        token_ids("stop_token_ids", self.stop_token_ids)
        boolean("include_stop_str_in_output", self.include_stop_str_in_output)
        boolean("ignore_eos", self.ignore_eos)
        boolean("skip_special_tokens", self.skip_special_tokens)
