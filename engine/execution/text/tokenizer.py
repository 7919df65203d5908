"""A model's tokenizer: text to ids, chats to ids by the model's own template, ids to text.

Invariants: whatever a user sends either becomes ids or an `InvalidParameter` that names the field; a text
that has more bytes than the longest prompt can have is refused before it is tokenized; tokenizing releases
the interpreter lock. This file does not know streams: it decodes what it is given.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.checkpoint.tokenizer_files import check_tokenizer_files
from engine.errors import InvalidParameter, NeverFits
from engine.execution.machine.library_messages import one_line, quiet_transformers
from engine.execution.text.byte_spelling import token_bytes_of_texts
from engine.execution.text.chat_template import ChatTemplate
from engine.execution.text.special_tokens import SelectiveEncoder, Span, SpecialTexts
from engine.execution.text.token_bytes import token_bytes_of
from engine.execution.text.token_lengths import longest_token_bytes
from engine.text.byte_decoder import TokenBytes

MAX_KEPT_CHARACTERS = 2048
MAX_KEPT_TEXTS = 512
"""Short texts (`bad_words`) whose ids are kept: they are encoded ahead of the step loop, which asks again."""


class Tokenizer:
    """Wraps a tokenizer of transformers; may be used by several threads at once.

    `special_ids`: ids that leave no text. `vocab_size`: ids that it knows, perhaps fewer than the model's.
    `max_prompt_tokens`: the longest prompt that is served; None: no text is too long. `max_prompt_bytes`: the
    longest text that can be such a prompt, in UTF-8; None: no bound follows from this tokenizer.
    """

    def __init__(self, tokenizer: Any, *, max_prompt_tokens: int | None = None) -> None:
        self._tokenizer = tokenizer
        # The Rust tokenizer beneath: a fifth of the time, and safe between threads. Old formats have none.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        self.special_ids = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._special_ids_by_text = {
            tokenizer.convert_ids_to_tokens(token_id): token_id for token_id in self.special_ids
        }
        #: An unknown token may also stand for text.
        self._control_ids = self.special_ids - {tokenizer.unk_token_id}
        self._spelling = None if self._backend is None else token_bytes_of(self._backend)
        self._spellings = dict[bool, TokenBytes | None]()
        if self._backend is not None:
            for skips in (True, False):
                self._spellings[skips] = token_bytes_of_texts(
                    self._backend, self._added.keys(), self.special_ids, skips=skips
                )
        self.vocab_size = len(tokenizer)
        self.has_chat_template = tokenizer.chat_template is not None
        self.max_prompt_bytes = None if self._backend is None else self._bound(max_prompt_tokens)
        self._max_prompt_tokens = max_prompt_tokens
        self._kept_ids = lru_cache(MAX_KEPT_TEXTS)(self._encode_text)
        specials = {n: one for n, one in tokenizer.added_tokens_decoder.items() if n in self.special_ids}
        self._chats = ChatTemplate(
            self._apply_template, SpecialTexts([one.content for one in specials.values()])
        )
        self._selective: SelectiveEncoder | None = None
        if self._backend is not None:
            # A file may state a truncation, which would cut prompts silently.
            self._backend.no_truncation()
            self._backend.no_padding()
            if self.has_chat_template and specials:
                self._selective = SelectiveEncoder(self._backend, specials)

    @classmethod
    def load(cls, directory: Path, *, max_prompt_tokens: int | None = None) -> "Tokenizer":
        """The tokenizer in a model's directory. Raises `InvalidParameter`."""
        check_tokenizer_files(directory)
        with quiet_transformers():
            try:
                tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
                return cls(tokenizer, max_prompt_tokens=max_prompt_tokens)
            except Exception as error:
                # Whatever a library raises while it reads a user's files is a fault of the files.
                reason = one_line(error)
                if "trust_remote_code" in str(error):
                    reason = "it is defined by code in the checkpoint (auto_map), which is never run"
                raise InvalidParameter("model", f"{directory} has no usable tokenizer: {reason}") from error

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The end of text as the tokenizer knows it, for models that state none."""
        eos = self._tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset({eos})

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens that the tokenizer adds. Special tokens in it are special.

        Raises `InvalidParameter`.
        """
        _check_unicode("prompt", text)
        self._check_size("prompt", text)
        return self._encode(text, add_special_tokens=True)

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text` as a part of some text: no special tokens are added. Raises `InvalidParameter`.

        The ids of short texts are kept for a while.
        """
        _check_unicode("text", text)
        if len(text) > MAX_KEPT_CHARACTERS:
            return self._encode(text, add_special_tokens=False)
        return list(self._kept_ids(text))

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`; None if there is none."""
        return self._special_ids_by_text.get(text)

    def render_chat(self, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        """Ids of a chat in the model's own template, up to where the assistant's answer begins.

        Special tokens are those that the template writes. The same text in a message is encoded as text.
        Raises `InvalidParameter` when there is no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidParameter("messages", "this model has no chat template; send a prompt instead")
        chat = [dict(message) for message in messages]
        text = self._chats.render(chat)
        _check_unicode("messages", text)
        self._check_size("messages", text)
        own = self._chats.own_specials(chat, text)
        if own is not None:
            return self._encode_selectively(text, own)
        # The template has written the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` as it is, no spaces tidied up; bytes that form no character are U+FFFD."""
        if self._backend is not None:
            try:
                text: str = self._backend.decode(token_ids, skip_special_tokens)
            except BaseException as error:
                # A panic in the library is not an Exception, and would end more than this request.
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
        """What each token adds to what `decode` gives; None if that depends on its neighbours."""
        return self._spellings.get(skip_special_tokens)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The token ids by token, without the tokens that were added to the trained vocabulary."""
        if self._backend is not None:
            return dict(self._backend.get_vocab(with_added_tokens=False))
        added = self._tokenizer.get_added_vocab()
        return {token: number for token, number in self._tokenizer.get_vocab().items() if token not in added}

    @property
    def added_tokens(self) -> dict[int, str]:
        """The tokens that were added to the trained vocabulary."""
        return dict(self._added)

    @property
    def knows_bytes(self) -> bool:
        """`token_bytes` is exact for every token."""
        return self._spelling is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, also parts of a character; of a special token its name's.

        Empty for ids that only the model knows. Not exact where the tokenizer's vocabulary is not understood
        (`knows_bytes`): then what the token alone decodes to.
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._backend is None or self._spelling is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else self._spelling(piece)

    def _bound(self, max_prompt_tokens: int | None) -> int | None:
        longest = longest_token_bytes(self._backend)
        return None if longest is None or max_prompt_tokens is None else int(longest * max_prompt_tokens)

    def _check_size(self, field: str, text: str) -> None:
        """Raises `NeverFits` for a text that has too many bytes for any prompt."""
        most = self.max_prompt_bytes
        if most is not None and len(text) * 4 > most and (size := len(text.encode())) > most:
            raise NeverFits(
                field,
                f"has {size} bytes of text; a prompt has at most {self._max_prompt_tokens} tokens, which are "
                f"at most {most} bytes",
            )

    def _apply_template(self, messages: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._encode(text, add_special_tokens=False))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        # Not `encode`: it holds the interpreter lock for all of its time, which a batch does not.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def _encode_selectively(self, text: str, own: list[Span]) -> list[int]:
        """The ids of `text`, whose special tokens are at `own` alone."""
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


def _check_unicode(field: str, text: str) -> None:
    try:
        # Half of a surrogate pair is a str in Python and no text anywhere else.
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            field, f"is no valid Unicode text: a lone surrogate at {error.start}"
        ) from error
