"""The assembler returns each event once, in order, and requests the log when one is missing."""

from tokenmill.protocol.assembler import Assembler
from tokenmill.protocol.messages import Event, FinishedEvent, TokenEvent


def token(seq: int) -> TokenEvent:
    return TokenEvent(id="t", seq=seq, token=seq, text="")


def test_each_event_is_returned_once_in_order() -> None:
    assembler = Assembler()
    assert assembler.replayed([token(0), token(1)]) == [token(0), token(1)]
    assert assembler.live(token(1)) == []
    assert assembler.live(token(2)) == [token(2)]
    assert not assembler.must_read_log
    assert assembler.live(token(5)) == []
    assert assembler.must_read_log
    # Live events before the log is read are in the log, too.
    assert assembler.live(token(3)) == []
    assert assembler.replayed([token(2), token(3), token(4), token(5)]) == [token(3), token(4), token(5)]
    assert assembler.live(token(6)) == [token(6)]


def test_the_log_is_read_first() -> None:
    assembler = Assembler(after=3)
    assert assembler.must_read_log
    assert assembler.live(token(4)) == []
    assert assembler.replayed([token(4)]) == [token(4)]


def test_the_stream_ends_with_the_last_of_several_outputs() -> None:
    end = FinishedEvent(id="t", seq=1, text="", finish_reason="stop", index=1)
    done = FinishedEvent(id="t", seq=2, text="", finish_reason="stop", done=True)
    assembler = Assembler()
    events: list[Event] = [token(0), end]
    assembler.replayed(events)
    assert not assembler.ended
    assembler.live(done)
    assert assembler.ended
