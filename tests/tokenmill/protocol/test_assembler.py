"""The pure part of a reader: each event once, ascending, and the log is asked for when one is missing."""

from tokenmill.protocol.assembler import Assembler
from tokenmill.protocol.messages import FinishedEvent, TokenEvent


def token(seq: int) -> TokenEvent:
    return TokenEvent(id="t", seq=seq, token=seq, text="")


def test_the_assembler_gives_each_once_in_order() -> None:
    assembler = Assembler()
    assert assembler.replayed([token(0), token(1)]) == [token(0), token(1)]
    assert assembler.live(token(1)) == []
    assert assembler.live(token(2)) == [token(2)]
    assert not assembler.must_read_log
    assert assembler.live(token(5)) == []
    assert assembler.must_read_log
    # What comes before the log was read again stands in the log.
    assert assembler.live(token(3)) == []
    assert assembler.replayed([token(2), token(3), token(4), token(5)]) == [token(3), token(4), token(5)]
    assert assembler.live(token(6)) == [token(6)]


def test_the_assembler_begins_with_the_log() -> None:
    assembler = Assembler(after=3)
    assert assembler.must_read_log
    assert assembler.live(token(4)) == []
    assert assembler.replayed([token(4)]) == [token(4)]


def test_the_assembler_ends_after_the_last_of_several_outputs() -> None:
    end = FinishedEvent(id="t", seq=1, text="", finish_reason="stop", index=1)
    done = FinishedEvent(id="t", seq=2, text="", finish_reason="stop", done=True)
    assembler = Assembler()
    assembler.replayed([token(0), end])
    assert not assembler.ended
    assembler.live(done)
    assert assembler.ended
