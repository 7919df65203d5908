"""Server-sent events are parsed from chunks that are cut anywhere."""

import pytest

from tokenmill.client.sse import Frame, frames

STREAM = (
    ": hello\n\nevent: token\r\nid: 4\r\ndata: a\u20ac\r\ndata: b\r\n\r\nretry: 1000\n\ndata:c\n\n".encode()
)
EXPECTED = [Frame("token", "a\u20ac\nb", "4"), Frame("message", "c", "")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_frames_end_at_empty_lines(size: int) -> None:
    chunks = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]

    assert list(frames(chunks)) == EXPECTED


def test_an_incomplete_frame_is_dropped() -> None:
    assert list(frames([b"data: whole\n", b"\n", b"data: par", b""])) == [Frame("message", "whole", "")]
    assert list(frames([b"data: no empty line\n"])) == []
