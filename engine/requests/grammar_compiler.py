"""Grammars are compiled here, off the step loop, in threads of their own.

Law: a grammar that is bad, slow or never done fails the requests that asked for it, and nothing else. A
thread inside a library cannot be stopped, so one that is over its time is written off: its requests get their
answer, another thread takes its place, and there is a limit to all threads together. Knows no grammar
library and no sequences.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from engine.constraints import Grammar
from engine.structured_outputs import StructuredOutputs

GrammarFactory = Callable[[], Grammar]
"""Gives a fresh grammar, at the start of its text, for one output."""

Compiled = GrammarFactory | str
"""What became of a grammar: a factory, or what is wrong with it, in words for the user."""

_Content = tuple[str, str]

BUSY = "all compilers of grammars are held up by grammars that take too long; try again later"


class Backend(Protocol):
    """A grammar library with a model's tokenizer; called by several threads at once."""

    def check(self) -> None:
        """Raises `InvalidParameter` where it can serve no request at all; takes no time."""
        ...

    def compile(self, structured_outputs: StructuredOutputs) -> GrammarFactory:
        """Raises any exception, whose text tells the user what is wrong."""
        ...


class GrammarCompiler:
    """Compiles what is submitted: each key comes out of `take_ready` once, unless it is forgotten before.

    Any thread may call, and no call but `wait` takes longer than a moment. Threads run while there is work:
    `num_threads` at most, and with those written off `max_threads`; none keeps the process alive.
    `timeout_seconds`: the most that one grammar may take, counted from when its turn has come. `max_cached`:
    how many results are kept, errors too; the least recently used goes first.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_threads: int = 2,
        max_threads: int = 4,
        timeout_seconds: float = 60.0,
        max_cached: int = 128,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend = backend
        self._num_threads = num_threads
        self._max_threads = max_threads
        self._timeout_seconds = timeout_seconds
        self._max_cached = max_cached
        self._clock = clock
        # Guards all below; notified when something is ready.
        self._condition = threading.Condition()
        self._waiting: OrderedDict[_Content, _Job] = OrderedDict()
        self._running: list[_Job] = []
        self._job_of: dict[str, _Job] = {}
        self._cache: OrderedDict[_Content, Compiled] = OrderedDict()
        self._ready: dict[str, Compiled] = {}
        self._num_working = 0
        self._num_written_off = 0

    def submit(self, key: str, structured_outputs: StructuredOutputs) -> None:
        """Put `key` in line; it is ready at once if the same was compiled before, or failed before.

        Raises `InvalidParameter` where this model can have no grammars.
        """
        self._backend.check()
        with self._condition:
            content = structured_outputs.content
            if content in self._cache:
                self._cache.move_to_end(content)
                self._ready[key] = self._cache[content]
                self._condition.notify_all()
                return
            job = self._find(content)
            if job is None:
                job = self._waiting[content] = _Job(structured_outputs)
            job.keys[key] = None
            self._job_of[key] = job
            self._start_thread()

    def take_ready(self) -> list[tuple[str, Compiled]]:
        """What has become of keys since the last call."""
        with self._condition:
            self._write_off()
            ready, self._ready = list(self._ready.items()), {}
            return ready

    def forget(self, key: str) -> None:
        """Nobody waits for `key` any more, and it will not come out. A key that is not known is fine."""
        with self._condition:
            self._ready.pop(key, None)
            job = self._job_of.pop(key, None)
            if job is None:
                return
            del job.keys[key]
            if not job.keys:
                self._waiting.pop(job.content, None)

    def wait(self, seconds: float) -> None:
        """Block until something is ready, for `seconds` at most; not at all if nothing is being compiled."""
        end = self._clock() + seconds
        with self._condition:
            while True:
                self._write_off()
                limits = [job.started + self._timeout_seconds for job in self._running]
                left = min([end, *limits]) - self._clock()
                if self._ready or not self._job_of or left <= 0:
                    return
                self._condition.wait(left)

    @property
    def num_threads(self) -> int:
        """Threads that run now, those written off with them."""
        with self._condition:
            return self._num_working + self._num_written_off

    def _find(self, content: _Content) -> "_Job | None":
        running = (job for job in self._running if job.content == content)
        return self._waiting.get(content) or next(running, None)

    def _start_thread(self) -> None:
        """One more, if there is work for it and room."""
        if (
            self._waiting
            and self._num_working < self._num_threads
            and self._num_working + self._num_written_off < self._max_threads
        ):
            threading.Thread(target=self._work, name="grammar", daemon=True).start()
            self._num_working += 1

    def _work(self) -> None:
        """One thread's life: it ends when nothing waits, or when it comes back after it was written off."""
        while (job := self._next()) is not None:
            if not self._settle(job, *self._compile(job.structured_outputs)):
                return

    def _next(self) -> "_Job | None":
        with self._condition:
            if not self._waiting:
                self._num_working -= 1
                return None
            _, job = self._waiting.popitem(last=False)
            job.started = self._clock()
            self._running.append(job)
            # Who waits must know of its limit.
            self._condition.notify_all()
            return job

    def _compile(self, structured_outputs: StructuredOutputs) -> tuple[Compiled, bool]:
        """What became of it, and whether the next who asks would get the same."""
        try:
            return self._backend.compile(structured_outputs), True
        except (OSError, MemoryError) as error:
            return f"the grammar could not be compiled now ({error}); try again later", False
        except BaseException as error:  # noqa: BLE001 - a panic inside a library derives from BaseException
            return str(error) or type(error).__name__, True

    def _settle(self, job: "_Job", compiled: Compiled, is_final: bool) -> bool:
        """Hand over a result; False if the thread that brings it was written off."""
        with self._condition:
            # Also a late one: who asks again need not wait for it again.
            if is_final:
                self._keep(job.content, compiled)
            if job in self._running:
                self._running.remove(job)
                self._deliver(job, compiled)
                return True
            self._num_written_off -= 1
            self._start_thread()
            return False

    def _keep(self, content: tuple[str, str], compiled: Compiled) -> None:
        self._cache[content] = compiled
        self._cache.move_to_end(content)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)

    def _deliver(self, job: "_Job", compiled: Compiled) -> None:
        for key in job.keys:
            self._ready[key] = compiled
            del self._job_of[key]
        self._condition.notify_all()

    def _write_off(self) -> None:
        """Answer for what is over its time, and put other threads in the place of those that are held up."""
        over = [job for job in self._running if self._clock() - job.started >= self._timeout_seconds]
        for job in over:
            self._running.remove(job)
            self._num_working -= 1
            self._num_written_off += 1
            error = f"the grammar was not compiled within {self._timeout_seconds:g} seconds; simplify it"
            self._keep(job.content, error)
            self._deliver(job, error)
            self._start_thread()
        if not self._num_working:
            while self._waiting:
                self._deliver(self._waiting.popitem(last=False)[1], BUSY)


class _Job:
    """One grammar to compile, and the keys of those who wait for it."""

    def __init__(self, structured_outputs: StructuredOutputs) -> None:
        self.structured_outputs = structured_outputs
        self.content = structured_outputs.content
        # A dict for its order, and so that forgetting one of many is quick.
        self.keys: dict[str, None] = {}
        #: On the compiler's clock, once it runs.
        self.started = 0.0
