"""Lines are written in order by a thread, and a reader that is slow, absent or gone stops no writer."""

import io
import os
import threading

import pytest

from tokenmill.process.line_writer import LineWriter

SECONDS = 60.0
"""A watchdog."""


def test_lines_are_written_in_order() -> None:
    stream = io.StringIO()
    writer = LineWriter(stream)

    for number in range(1000):
        writer.write(str(number))

    assert writer.flush(SECONDS)
    assert stream.getvalue().split() == [str(number) for number in range(1000)]


def test_a_pipe_that_nobody_reads_blocks_no_writer_and_loses_only_new_lines() -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "w") as stream:
        writer = LineWriter(stream, max_lines=10)
        line = "x" * 100_000
        # More than a pipe and the queue hold. It would block forever if a caller waited.
        for _ in range(50):
            writer.write(line)
        assert not writer.flush(0)

        shown: list[bytes] = []
        drain = threading.Thread(target=lambda: shown.extend(reader))
        drain.start()
        assert writer.flush(SECONDS)
        writer.write("end")
        assert writer.flush(SECONDS)
        stream.close()
        drain.join()

    # Lines that came after the writer had taken some of the first ten are kept too.
    assert 10 <= shown.count(line.encode() + b"\n") < 50
    num_kept = shown.count(line.encode() + b"\n")
    (missing,) = [one for one in shown if b"missing" in one]
    assert missing.startswith(b"%d lines are missing here" % (50 - num_kept))
    assert shown[-1] == b"end\n" or shown[-2] == b"end\n"


def test_a_reader_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as stream:
        writer = LineWriter(stream)
        for _ in range(3):
            writer.write("lost")
            assert writer.flush(SECONDS)


def test_a_full_disk_only_loses_lines() -> None:
    with open("/dev/full", "w") as full:
        writer = LineWriter(full)
        writer.write("lost")
        assert writer.flush(SECONDS)


def test_without_a_stream_lines_are_discarded() -> None:
    writer = LineWriter(None)
    writer.write("lost")
    assert writer.flush(SECONDS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own() -> None:
    read, write = os.pipe()
    with open(read, "rb") as reader, open(write, "w") as stream:
        writer = LineWriter(stream)
        writer.write("parent")
        assert writer.flush(SECONDS)
        if (pid := os.fork()) == 0:
            writer.write("child")
            os._exit(0 if writer.flush(SECONDS) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        stream.close()
        assert reader.read() == b"parent\nchild\n"
