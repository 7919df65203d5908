"""Compiles grammars in background threads.

A grammar that is invalid, slow or never finishes compiling fails only the requests that use it. A thread
inside a library cannot be stopped, so a thread that exceeds the timeout is abandoned: its requests fail,
another thread replaces it, and the number of all threads is limited.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from engine.constraints import Grammar
from engine.structured_outputs import StructuredOutputs

log = logging.getLogger(__name__)

GrammarFactory = Callable[[], Grammar]
"""Returns a new grammar at the start of its text, for one output."""

Compiled = GrammarFactory | str
"""The result of a compilation: a factory, or an error message for the user."""

_Content = tuple[str, str]

BUSY = "no thread is free to compile the grammar; try again later"


class GrammarBackend(Protocol):
    """A grammar library with a model's tokenizer; called by several threads at once."""

    def check(self) -> None:
        """Raises `InvalidParameter` if it supports no grammar at all. Does not block."""
        ...

    def compile(self, structured_outputs: StructuredOutputs) -> GrammarFactory:
        """Raises any exception; its text is the error message for the user."""
        ...


class GrammarCompilerPool:
    """Compiles what is submitted: `pop_ready` returns each key once, unless it is cancelled.

    Thread-safe; no call but `wait` blocks. Up to `num_threads` threads run while there is work; together with
    abandoned ones they are at most `max_threads`. All are daemon threads. `timeout_seconds`: limit for
    one compilation, without the time in the queue. `max_cached`: results kept, errors included, evicted least
    recently used first.
    """

    def __init__(
        self,
        backend: GrammarBackend,
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
        # Guards everything below; notified when a result is ready.
        self._condition = threading.Condition()
        self._waiting: OrderedDict[_Content, _Job] = OrderedDict()
        self._running: list[_Job] = []
        self._job_of: dict[str, _Job] = {}
        self._cache: OrderedDict[_Content, Compiled] = OrderedDict()
        self._ready: dict[str, Compiled] = {}
        self._num_working = 0
        self._num_abandoned = 0

    def submit(self, key: str, structured_outputs: StructuredOutputs) -> None:
        """Queue a compilation for `key`; a cached result is ready at once.

        Raises `InvalidParameter` if this model supports no grammars.
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

    def pop_ready(self) -> list[tuple[str, Compiled]]:
        """Results since the last call, by key."""
        with self._condition:
            self._abandon_overdue()
            ready, self._ready = list(self._ready.items()), {}
            return ready

    def cancel(self, key: str) -> None:
        """Drop `key`: it will not be returned. Unknown keys are ignored."""
        with self._condition:
            self._ready.pop(key, None)
            job = self._job_of.pop(key, None)
            if job is None:
                return
            del job.keys[key]
            if not job.keys:
                self._waiting.pop(job.content, None)

    def wait(self, seconds: float) -> None:
        """Block until a result is ready, at most `seconds`; returns at once if nothing is being compiled."""
        end = self._clock() + seconds
        with self._condition:
            while True:
                self._abandon_overdue()
                timeouts = [job.started + self._timeout_seconds for job in self._running]
                remaining = min([end, *timeouts]) - self._clock()
                if self._ready or not self._job_of or remaining <= 0:
                    return
                self._condition.wait(remaining)

    @property
    def num_threads(self) -> int:
        """Threads that are running, abandoned ones included."""
        with self._condition:
            return self._num_working + self._num_abandoned

    def _find(self, content: _Content) -> "_Job | None":
        running = (job for job in self._running if job.content == content)
        return self._waiting.get(content) or next(running, None)

    def _start_thread(self) -> None:
        """Start one more thread if there is work for it and the limits allow it.

        Without any thread, `_abandon_overdue` fails the queued requests.
        """
        if (
            self._waiting
            and self._num_working < self._num_threads
            and self._num_working + self._num_abandoned < self._max_threads
        ):
            try:
                threading.Thread(target=self._work, name="grammar", daemon=True).start()
            except RuntimeError as error:  # The process has as many threads as it may have.
                log.warning("no thread for a grammar: %s", error)
                return
            self._num_working += 1

    def _work(self) -> None:
        """A thread's main loop: ends when the queue is empty, or when the thread was abandoned."""
        while (job := self._next()) is not None:
            if not self._finish(job, *self._compile(job.structured_outputs)):
                return

    def _next(self) -> "_Job | None":
        with self._condition:
            if not self._waiting:
                self._num_working -= 1
                return None
            _, job = self._waiting.popitem(last=False)
            job.started = self._clock()
            self._running.append(job)
            # Threads in `wait` must include this job's timeout.
            self._condition.notify_all()
            return job

    def _compile(self, structured_outputs: StructuredOutputs) -> tuple[Compiled, bool]:
        """The result, and whether it may be cached."""
        try:
            return self._backend.compile(structured_outputs), True
        except (OSError, MemoryError) as error:
            return f"the grammar could not be compiled now ({error}); try again later", False
        except BaseException as error:  # noqa: BLE001 - a panic inside a library derives from BaseException
            return str(error) or type(error).__name__, True

    def _finish(self, job: "_Job", compiled: Compiled, is_cacheable: bool) -> bool:
        """Store a result; False if its thread was abandoned."""
        with self._condition:
            # A late result is cached too, for later requests with the same grammar.
            if is_cacheable:
                self._cache_result(job.content, compiled)
            if job in self._running:
                self._running.remove(job)
                self._deliver(job, compiled)
                return True
            self._num_abandoned -= 1
            self._start_thread()
            return False

    def _cache_result(self, content: _Content, compiled: Compiled) -> None:
        self._cache[content] = compiled
        self._cache.move_to_end(content)
        while len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)

    def _deliver(self, job: "_Job", compiled: Compiled) -> None:
        for key in job.keys:
            self._ready[key] = compiled
            del self._job_of[key]
        self._condition.notify_all()

    def _abandon_overdue(self) -> None:
        """Fail the compilations that exceeded the timeout, and replace their threads.

        If no thread can run the queued compilations, these fail as well.
        """
        overdue = [job for job in self._running if self._clock() - job.started >= self._timeout_seconds]
        for job in overdue:
            self._running.remove(job)
            self._num_working -= 1
            self._num_abandoned += 1
            error = f"the grammar was not compiled within {self._timeout_seconds:g} seconds; simplify it"
            self._cache_result(job.content, error)
            self._deliver(job, error)
            self._start_thread()
        if not self._num_working:
            while self._waiting:
                self._deliver(self._waiting.popitem(last=False)[1], BUSY)


class _Job:
    """A grammar to compile, and the keys that were submitted for it."""

    def __init__(self, structured_outputs: StructuredOutputs) -> None:
        self.structured_outputs = structured_outputs
        self.content = structured_outputs.content
        # A dict keeps the order and makes cancelling one of many fast.
        self.keys: dict[str, None] = {}
        #: On the compiler's clock, once it runs.
        self.started = 0.0
