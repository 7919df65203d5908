"""Streams of text with every kind of tokenizer: text that was sent is never retracted."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.execution.text.tokenizer import Tokenizer
from engine.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer, IncrementalDecoder
from tests.engine.fakes import final_text
from tests.tiny_models import make_tokenizer
from tests.tiny_tokenizers import TINY_TOKENIZERS

TOKENIZERS = {"byte level": Tokenizer(make_tokenizer())} | {
    kind: Tokenizer(make()) for kind, make in TINY_TOKENIZERS.items()
}
FALLBACKS = ("sentencepiece", "metaspace", "unread fallback")
BYTES = {kind: [TOKENIZERS[kind].encode_text("\x00")[-1] + byte for byte in range(256)] for kind in FALLBACKS}
for kind, ids in BYTES.items():
    # A letter is a piece, and ends a run of bytes.
    ids[ord("a")] = TOKENIZERS[kind].encode_text("xa")[-1]


def token_ids(kind: str) -> st.SearchStrategy[list[int]]:
    """Any tokens, and often bytes of whole and incomplete characters."""
    anything = st.integers(0, TOKENIZERS[kind].vocab_size - 1)
    if kind not in FALLBACKS:
        return st.lists(anything, max_size=40)
    byte = st.sampled_from([BYTES[kind][one] for one in "é世👋a".encode()])
    return st.lists(anything | byte, max_size=40)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_joined_pieces_are_the_final_text_however_it_ends_and_resumes(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt, output = data.draw(token_ids(kind).filter(bool)), data.draw(token_ids(kind))
    params = SamplingParams(
        skip_special_tokens=data.draw(st.booleans()),
        stop=tuple(data.draw(st.lists(st.text("aé the.", min_size=1, max_size=3), max_size=2))),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    crash = data.draw(st.integers(0, len(output)))
    cancelled = data.draw(st.integers(0, len(output)))
    final = final_text(tokenizer, prompt, output, params)
    stream, sent = Detokenizer(tokenizer, prompt, params), ""

    for position, token_id in enumerate(output):
        if position == crash:
            # Another worker replays the tokens and continues.
            stream = Detokenizer(tokenizer, prompt, params)
            assert "".join(map(stream.push, output[:crash])) == sent
        sent += stream.push(token_id)
        assert final.startswith(sent)
        if position == cancelled:
            short = final_text(tokenizer, prompt, output[: position + 1], params)
            assert short.startswith(sent)
    assert sent + stream.close() == final


@pytest.mark.parametrize("kind", FALLBACKS)
@pytest.mark.parametrize(
    ("output", "pieces"),
    [
        (b"\xc3\xa9\xc3", ["", "é", "", "\ufffd"]),
        (b"\xc3\xa9\xc3\xa9\xff", ["", "é", "", "é", None, None]),
        ("世".encode() + b"\xe4\xb8a", ["", "", "世", "", "", None, ""]),
        (b"a\xc3\xa9\xc3\xc3\xc3\xc3\xc3\xc3", ["a", "", "é", *[None] * 7]),
    ],
)
def test_a_broken_run_of_bytes_does_not_retract_earlier_characters(
    kind: str, output: bytes, pieces: list[str | None]
) -> None:
    """The character was sent first, and later U+FFFD for each of its bytes."""
    tokenizer = TOKENIZERS[kind]
    prompt = tokenizer.encode_text("x")
    stream = Detokenizer(tokenizer, prompt, SamplingParams())

    sent = [stream.push(BYTES[kind][byte]) for byte in output]
    sent.append(stream.close())

    assert [one for one, expected in zip(sent, pieces, strict=True) if expected is not None] == [
        one for one in pieces if one is not None
    ]
    valid = output.decode(errors="ignore")
    assert "".join(sent).replace("\ufffd", "") == valid
    assert "\ufffd" in "".join(sent)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "metaspace", "unread fallback"])
@given(prompt=st.text("a é世", min_size=1), text=st.text("ab é世👋\n"))
@example(prompt="a", text="👋")
def test_valid_text_streams_as_it_is_decoded(kind: str, prompt: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode_text(prompt + text)
    before = tokenizer.encode_text(prompt)
    if not text or ids[: len(before)] != before or not prompt.strip():
        return
    whole, start = tokenizer.decode(ids), tokenizer.decode(before)
    expected = whole[len(start) :] if kind != "unread fallback" else None

    sent = final_text(tokenizer, before, ids[len(before) :], SamplingParams())

    assert "\ufffd" not in sent
    if expected is not None:
        assert sent == expected


@given(output=st.lists(st.sampled_from(list("é世a".encode() + b"\xff")), max_size=40))
def test_broken_bytes_in_windows_cost_a_short_decode(output: list[int]) -> None:
    """A tokenizer without token bytes is decoded in windows, which stay short in runs of broken bytes."""
    tokenizer, longest = TOKENIZERS["unread fallback"], 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    decoder = IncrementalDecoder(decode, tokenizer.encode_text("x"))
    ids = [BYTES["unread fallback"][byte] for byte in output * 8]
    text = "".join(map(decoder.push, ids)) + decoder.close()

    assert longest <= 40
    assert text.count("a") == (output * 8).count(ord("a"))
