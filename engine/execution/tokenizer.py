"""A model's tokenizer: text to ids, chats to ids by the model's own template, ids to text.

Law: whatever a user sends either becomes ids or an `InvalidParameter` that names the field. This file does
not know streams: it decodes what it is given.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from engine.checkpoint.tokenizer_files import check_tokenizer_files
from engine.errors import InvalidParameter
from engine.execution.one_line import one_line
from engine.execution.quiet import quiet_transformers
from engine.execution.spelled_tokens import spelling_of_texts
from engine.execution.token_bytes import spelling_of
from engine.spelled_text import Spelling


class Tokenizer:
    """Wraps a tokenizer of transformers; may be used by several threads at once.

    `special_ids`: ids that leave no text. `vocab_size`: ids that it knows, perhaps fewer than the model's.
    """

    def __init__(self, tokenizer: Any) -> None:
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
        self._spelling = None if self._backend is None else spelling_of(self._backend)
        self._spellings = dict[bool, Spelling | None]()
        if self._backend is not None:
            for skips in (True, False):
                self._spellings[skips] = spelling_of_texts(
                    self._backend, self._added.keys(), self.special_ids, skips=skips
                )
        self.vocab_size = len(tokenizer)
        self.has_chat_template = tokenizer.chat_template is not None

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """The tokenizer in a model's directory. Raises `InvalidParameter`."""
        check_tokenizer_files(directory)
        with quiet_transformers():
            try:
                return cls(AutoTokenizer.from_pretrained(directory, trust_remote_code=False))
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
        """Ids of `text`, with the special tokens that the tokenizer adds. Raises `InvalidParameter`."""
        return self._encode("prompt", text, add_special_tokens=True)

    def encode_text(self, text: str) -> list[int]:
        """Ids of `text` as a part of some text: no special tokens are added. Raises `InvalidParameter`."""
        return self._encode("text", text, add_special_tokens=False)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`; None if there is none."""
        return self._special_ids_by_text.get(text)

    def render_chat(self, messages: Iterable[Mapping[str, str]]) -> list[int]:
        """Ids of a chat in the model's own template, up to where the assistant's answer begins.

        Raises `InvalidParameter` when there is no template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise InvalidParameter("messages", "this model has no chat template; send a prompt instead")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            # A template is the model's program: what it raises at messages that it dislikes is its own.
            raise InvalidParameter("messages", f"the model's chat template refuses them: {error}") from error
        # The template has written the special tokens itself.
        return self._encode("messages", text, add_special_tokens=False)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids` as it is, no spaces tidied up; bytes that form no character are U+FFFD."""
        if self._backend is not None:
            text: str = self._backend.decode(token_ids, skip_special_tokens)
            return text
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def spelling(self, skip_special_tokens: bool = True) -> Spelling | None:
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

    def _encode(self, field: str, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # Half of a surrogate pair is a str in Python and no text anywhere else.
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameter(
                field, f"is no valid Unicode text: a lone surrogate at {error.start}"
            ) from error
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
