"""Tokenizers of the usual kinds, besides the byte-level one of the tiny models.

The vocabularies are tiny: those with byte fallback encode most text as bytes.
"""

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
CHARACTERS = '▁abcdefghijklmnopqrstuvwxyz"{}[]:,.-0123456789é'
MERGES = [
    ("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ('"', ":"), ("{", '"'), ("1", "2"),
]  # fmt: skip


def make_sentencepiece() -> PreTrainedTokenizerFast:
    """As in Llama 2: a space is U+2581, one is prepended, and unknown bytes are `<0xE4>`."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *CHARACTERS]
    pieces += ["".join(pair) for pair in MERGES]
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def make_metaspace() -> PreTrainedTokenizerFast:
    """As in newer SentencePiece models: the pre-tokenizer prepends the space."""
    fast = make_sentencepiece()
    backend = fast.backend_tokenizer
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def make_unread_fallback() -> PreTrainedTokenizerFast:
    """Byte fallback with an unknown decoder step, so that texts are decoded in windows."""
    fast = make_sentencepiece()
    backend = fast.backend_tokenizer
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("▁"), " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def make_wordpiece() -> PreTrainedTokenizerFast:
    """As in BERT: `##` continues a word, and spaces before punctuation are removed."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "a", "the", "##s", "##e", ".", "'", "n't", "do", "é", "##é"]
    backend = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]"
    )


def make_words() -> PreTrainedTokenizerFast:
    """Whole words, joined by spaces as without a decoder."""
    words = ["<unk>", "<s>", "</s>", "a", "", "é", "b\ufffd", "."]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


TINY_TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "sentencepiece": make_sentencepiece,
    "metaspace": make_metaspace,
    "unread fallback": make_unread_fallback,
    "wordpiece": make_wordpiece,
    "words": make_words,
}
