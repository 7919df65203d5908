"""A model's tokenizer: encodes texts and chats, decodes token ids.

Input that cannot be encoded raises `InvalidParameter` with the name of its field. A text with more bytes than
the longest prompt can have is refused before it is tokenized. Tokenizing releases the interpreter lock.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import AutoTokenizer

from engine.checkpoint.reading import listed
from engine.checkpoint.tokenizer_files import check_tokenizer_files
from engine.errors import InvalidParameter, NeverFits
from engine.execution.machine.library_messages import one_line, quiet_transformers
from engine.text.byte_decoder import TokenBytes
from engine.text.chat_template import ChatTemplate
from engine.text.special_tokens import SelectiveEncoder, Span, SpecialTexts
from engine.text.token_bytes import context_free_bytes, piece_bytes_of
from engine.text.token_lengths import longest_token_bytes
from engine.text.tools import has_tool_turns, tool_format_of, with_plain_tools
from engine.validation import check_encoding

logger = logging.getLogger(__name__)

MAX_CACHED_CHARACTERS = 2048
MAX_CACHED_TEXTS = 512
"""The ids of short texts (`bad_words`) are cached: they are encoded before the step loop asks for them."""
_SAMPLE = "hello world"


class Tokenizer:
    """Wraps a tokenizer of transformers. Thread-safe.

    `special_ids`: ids without text. `vocab_size`: ids that it knows, perhaps fewer than the model's.
    `max_prompt_tokens`: the longest prompt that is served; None: any text is encoded. `max_prompt_bytes`: the
    most bytes of UTF-8 that such a prompt can have; None: unbounded. `tool_format`: how the model writes
    calls of tools, see `engine/text/tools.py`.
    """

    def __init__(self, tokenizer: Any, *, max_prompt_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer: thread-safe, and five times as fast. Old formats have none.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        added = tokenizer.added_tokens_decoder
        self._added = {token_id: str(token) for token_id, token in added.items()}
        self.special_ids = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in added.items() if token.special
        }
        self._special_ids_by_text = {tokenizer.convert_ids_to_tokens(one): one for one in self.special_ids}
        # Without the unknown token, which may also stand for text.
        self._control_ids = self.special_ids - {tokenizer.unk_token_id}
        self.vocab_size = len(tokenizer)
        self.has_chat_template = tokenizer.chat_template is not None
        # A model may have several templates by name.
        template = str(tokenizer.chat_template)
        self._template_has_tools = "tools" in template
        self.tool_format = tool_format_of(template)
        self._max_prompt_tokens = max_prompt_tokens
        self._cached_ids = lru_cache(MAX_CACHED_TEXTS)(self._encode_text)
        specials = {token_id: token for token_id, token in added.items() if token_id in self.special_ids}
        self._chats = ChatTemplate(
            self._apply_template, SpecialTexts([one.content for one in specials.values()])
        )
        self._piece_bytes = None if self._backend is None else piece_bytes_of(self._backend)
        self._decoded_bytes = dict[bool, TokenBytes | None]()
        self._selective: SelectiveEncoder | None = None
        self.max_prompt_bytes: int | None = None
        if self._backend is not None:
            self._read_backend(self._backend, specials)

    def _read_backend(self, backend: Any, specials: dict[int, Any]) -> None:
        for skips in (True, False):
            self._decoded_bytes[skips] = context_free_bytes(
                backend, self._added.keys(), self.special_ids, skips=skips
            )
        longest = longest_token_bytes(backend)
        if longest is not None and self._max_prompt_tokens is not None:
            self.max_prompt_bytes = int(longest * self._max_prompt_tokens)
        # A truncation in the tokenizer's file would silently cut prompts.
        backend.no_truncation()
        backend.no_padding()
        if self.has_chat_template and specials:
            self._selective = SelectiveEncoder(backend, specials)

    @classmethod
    def load(cls, directory: Path, *, max_prompt_tokens: int | None = None) -> "Tokenizer":
        """The tokenizer in a model's directory. Raises `InvalidParameter`."""
        check_tokenizer_files(directory)
        with quiet_transformers():
            try:
                tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
                return cls(tokenizer, max_prompt_tokens=max_prompt_tokens)
            except Exception as error:
                # Any error while a library reads a user's files is an error in the files.
                reason = one_line(error)
                if "trust_remote_code" in str(error):
                    reason = "it is defined by code in the checkpoint (auto_map), which is never run"
                raise InvalidParameter("model", f"{directory} has no usable tokenizer: {reason}") from error

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokenizer's own end of text, for models that state none."""
        eos = self._tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset({eos})

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the tokenizer adds. Special tokens in it are special.

        Raises `InvalidParameter`.
        """
        self._check_text("prompt", text)
        return self._encode(text, add_special_tokens=True)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a part of a text, without added special tokens. Raises `InvalidParameter`."""
        check_encoding("text", text, None)
        if len(text) > MAX_CACHED_CHARACTERS:
            return self._encode(text, add_special_tokens=False)
        return list(self._cached_ids(text))

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`; None if there is none."""
        return self._special_ids_by_text.get(text)

    def render_chat(
        self,
        messages: Iterable[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a chat in the model's own template, up to the start of the assistant's answer.

        `tools`: functions that the model may call, as OpenAI's API defines them. `arguments`: further
        variables of the template.
        Special tokens are those that the template writes; the same text in a message is encoded as text.
        Raises `InvalidParameter` if there is no template, or if the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidParameter("messages", "this model has no chat template; send a prompt instead")
        turns = [dict(message) for message in messages]
        if not self._template_has_tools and (tools or has_tool_turns(turns)):
            turns, tools = [dict(turn) for turn in with_plain_tools(turns, tools)], ()
        chat = (turns, list(tools), dict(arguments or {}))
        text = self._chats.render(chat)
        self._check_text("messages", text)
        own = self._chats.own_specials(chat, text)
        if own is not None:
            return self._encode_selectively(text, own)
        # The template has written the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The exact text of `token_ids`, without cleaned-up spaces. Invalid UTF-8 becomes U+FFFD."""
        if self._backend is not None:
            try:
                text: str = self._backend.decode(token_ids, skip_special_tokens)
            except BaseException as error:
                # A panic in the library is no `Exception`, and would end more than this request.
                if type(error).__name__ == "PanicException":
                    raise RuntimeError(f"the tokenizer failed: {error}") from error
                raise
            return text
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def decoded_bytes(self, skip_special_tokens: bool = True) -> TokenBytes | None:
        """The bytes that each token adds to the text of `decode`; None if they depend on its neighbours."""
        return self._decoded_bytes.get(skip_special_tokens)

    @property
    def tokens(self) -> tuple[dict[str, int], dict[str, int]]:
        """Token ids by token: those of the trained vocabulary, and added ones."""
        added = {token: token_id for token_id, token in self._added.items()}
        if self._backend is not None:
            return self._backend.get_vocab(with_added_tokens=False), added
        vocabulary = self._tokenizer.get_vocab()
        return {token: token_id for token, token_id in vocabulary.items() if token not in added}, added

    @property
    def knows_bytes(self) -> bool:
        """Whether `token_bytes` is exact for every token."""
        return self._piece_bytes is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, perhaps part of a character; of an added or special token, its name.

        Empty for ids that only the model has. Without `knows_bytes`, what the token decodes to on its own.
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._backend is None or self._piece_bytes is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece)

    def _check_text(self, field: str, text: str) -> None:
        """Raise `InvalidParameter` for a lone surrogate, `NeverFits` for a text too long for a prompt."""
        check_encoding(field, text, None)
        limit = self.max_prompt_bytes
        if limit is not None and len(text) * 4 > limit and (size := len(text.encode())) > limit:
            raise NeverFits(
                field,
                f"has {size} bytes of text; a prompt has at most {self._max_prompt_tokens} tokens, which are "
                f"at most {limit} bytes",
            )

    def _apply_template(self, chat: Any) -> str:
        messages, tools, arguments = chat
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=False, add_generation_prompt=True, **arguments
            )
        )

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text, add_special_tokens=False))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        # Not `encode`, which holds the interpreter lock throughout.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _encode_selectively(self, text: str, own: list[Span]) -> list[int]:
        """The ids of `text`, in which only the special tokens at `own` are special."""
        if self._selective is not None:
            ids = self._selective.encode(text, own)
        else:
            ids, end = list[int](), 0
            for start, stop in [*own, (len(text), len(text))]:
                ids += self._tokenizer.encode(
                    text[end:start], add_special_tokens=False, split_special_tokens=True
                )
                ids += [self._special_ids_by_text[text[start:stop]]] if stop > start else []
                end = stop
        if sum(one in self._control_ids for one in ids) > len(own):
            raise InvalidParameter(
                "messages", "they have the text of a special token, which this tokenizer cannot read as text"
            )
        return ids


def load_tokenizer(directory: Path, vocab_size: int, *, max_prompt_tokens: int | None = None) -> Tokenizer:
    """The tokenizer in a model's directory, checked against an embedding of `vocab_size` rows.

    Raises `InvalidParameter` if every text, or every chat, would fail or be misread. Some published models
    add a token without a row in the embedding, for images. It is logged; prompts that contain it are refused.
    """
    tokenizer = Tokenizer.load(directory, max_prompt_tokens=max_prompt_tokens)
    if not tokenizer.encode_text(_SAMPLE):
        raise InvalidParameter("model", "its tokenizer turns text into no tokens; its files are incomplete")
    trained, added = tokenizer.tokens
    if (largest := max(trained.values(), default=0)) >= vocab_size:
        raise InvalidParameter(
            "model",
            f"its tokenizer has token ids up to {largest}, but its embedding has {vocab_size} rows"
            " (vocab_size); tokenizer and weights are of different models",
        )
    if extra := sorted(token for token, token_id in added.items() if token_id >= vocab_size):
        logger.warning(
            "the model has no embedding for %s; prompts that contain them are refused", listed(extra)
        )
    if tokenizer.has_chat_template:
        _check_template(tokenizer)
    return tokenizer


def _check_template(tokenizer: Tokenizer) -> None:
    """Raise `InvalidParameter` for a template that cannot be parsed. It may refuse the sample chat."""
    try:
        tokenizer.render_chat([{"role": "user", "content": _SAMPLE}])
    except InvalidParameter as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            reason = f"its chat template cannot be parsed: {one_line(error.__cause__)}"
            raise InvalidParameter("model", reason) from error
