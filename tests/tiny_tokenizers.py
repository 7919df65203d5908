"""A tokenizer as SentencePiece makes them, beside the byte-level one of the tiny models.

Law: it knows few characters, so that most text is spelt in bytes.
"""

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]
CHARACTERS = '▁abcdefghijklmnopqrstuvwxyz"{}[]:,.-0123456789é'
MERGES = [
    ("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ('"', ":"), ("{", '"'), ("1", "2"),
]  # fmt: skip


def make_sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: a space is U+2581, one is put in front, and unknown bytes are `<0xE4>`."""
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
