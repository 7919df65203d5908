"""Checks that a tokenizer works and belongs to the model: each of its ids has a row in the embedding."""

import logging
from pathlib import Path

from jinja2 import TemplateSyntaxError

from engine.checkpoint.reading import listed
from engine.errors import InvalidParameter
from engine.execution.machine.library_messages import one_line
from engine.execution.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SAMPLE = "hello world"


def load_tokenizer(directory: Path, vocab_size: int, *, max_prompt_tokens: int | None = None) -> Tokenizer:
    """The tokenizer in a model's directory, checked against an embedding of `vocab_size` rows.

    `max_prompt_tokens`: as in `Tokenizer`.

    Raises `InvalidParameter`.
    """
    tokenizer = Tokenizer.load(directory, max_prompt_tokens=max_prompt_tokens)
    check_tokenizer(tokenizer, vocab_size)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise `InvalidParameter` if every text, or every chat, would fail or be misread.

    Some published models add a token without a row in the embedding, for images that they never see. Such
    tokens are reported; a prompt that contains one is refused when it comes.
    """
    if not tokenizer.encode_text(_SAMPLE):
        raise InvalidParameter("model", "its tokenizer turns text into no tokens; its files are incomplete")
    beyond = [number for number in tokenizer.vocabulary.values() if number >= vocab_size]
    if beyond:
        raise InvalidParameter(
            "model",
            f"its tokenizer has token ids up to {max(beyond)}, but its embedding has {vocab_size} rows"
            " (vocab_size); tokenizer and weights are of different models",
        )
    extra = sorted(token for number, token in tokenizer.added_tokens.items() if number >= vocab_size)
    if extra:
        logger.warning(
            "the model has no embedding for %s; prompts that contain them are refused", listed(extra)
        )
    if tokenizer.has_chat_template:
        _check_template(tokenizer)


def _check_template(tokenizer: Tokenizer) -> None:
    """A template may refuse a chat, but it must be one."""
    try:
        tokenizer.render_chat([{"role": "user", "content": _SAMPLE}])
    except InvalidParameter as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            reason = f"its chat template cannot be parsed: {one_line(error.__cause__)}"
            raise InvalidParameter("model", reason) from error
