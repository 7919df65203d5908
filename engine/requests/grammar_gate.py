"""Requests whose grammar is being compiled: they wait outside the line, and the step loop never for them.

Law: a grammar that does not compile is its own request's fault. Knows no grammar library.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from engine.constraints import Grammar
from engine.errors import InvalidParameter
from engine.requests.request_state import Output, Request, describe
from engine.requests.stop_rules import StopRules
from engine.sequence import FinishReason
from engine.structured_outputs import FIELD, StructuredOutputs

IDLE_WAIT_SECONDS = 0.01
"""A step that has nothing else to do waits so long for a grammar, rather than keep a CPU busy."""


class GrammarCompiler(Protocol):
    """What the engine needs of a grammar compiler. Errors in a grammar are reported later."""

    def submit(self, key: str, structured_outputs: StructuredOutputs) -> None:
        """Returns at once; `key` is told once, unless it is forgotten before.

        Raises `InvalidParameter` where this model can have no grammars.
        """
        ...

    def take_ready(self) -> list[tuple[str, Callable[[], Grammar] | str]]:
        """What was done since last asked: what makes a new grammar for each output, or why there is none."""
        ...

    def forget(self, key: str) -> None: ...

    def wait(self, seconds: float) -> None:
        """Return when something is ready, at the latest after `seconds`."""
        ...


class GrammarGate:
    """Holds requests until their grammar is there. Without a compiler, structured outputs are refused."""

    def __init__(self, compiler: GrammarCompiler | None, rules: StopRules) -> None:
        self._compiler = compiler
        self._rules = rules
        self._serials = itertools.count()
        self._waiting: dict[str, Request] = {}
        self._keys: dict[Request, str] = {}

    @property
    def is_awaited(self) -> bool:
        """Some request waits for its grammar."""
        return bool(self._waiting)

    def check(self, structured_outputs: StructuredOutputs | None) -> None:
        """Raises `InvalidParameter`."""
        if structured_outputs is not None and self._compiler is None:
            raise InvalidParameter(FIELD, "this engine has no grammar compiler")

    def submit(self, request: Request) -> None:
        """Have the grammar of a request that needs one compiled."""
        if self._compiler and request.params.structured_outputs is not None:
            # Not the request's id alone: one that was discarded may come again.
            key = f"{request.request_id} {next(self._serials)}"
            self._waiting[key] = request
            self._keys[request] = key
            self._compiler.submit(key, request.params.structured_outputs)

    def forget(self, request: Request) -> None:
        """It ends without its grammar. Nothing happens if it waits for none."""
        if self._compiler and (key := self._keys.pop(request, None)):
            del self._waiting[key]
            self._compiler.forget(key)

    def take_ready(self, *, is_idle: bool) -> list[tuple[Request, str | None]]:
        """Requests whose compilation is done, each with the reason why it failed, or None.

        The outputs of the others have their grammars then, or an error of their own. `is_idle`: there is
        nothing else to do.
        """
        assert self._compiler is not None, "nothing is submitted without one"
        if is_idle:
            self._compiler.wait(IDLE_WAIT_SECONDS)
        return [self._open(key, compiled) for key, compiled in self._compiler.take_ready()]

    def _open(self, key: str, compiled: Callable[[], Grammar] | str) -> tuple[Request, str | None]:
        request = self._waiting.pop(key)
        del self._keys[request]
        if isinstance(compiled, str):
            return request, f"{FIELD}: {compiled}"
        for output in request.outputs:
            self._give(output, compiled)
        return request, None

    def _give(self, output: Output, make: Callable[[], Grammar]) -> None:
        """A grammar that stands where the output does; a resumed one may have been at its end."""
        sequence = output.sequence
        try:
            sequence.constraints = replace(sequence.constraints, grammar=make())
            if self._rules.has_completed_grammar(sequence):
                output.end = FinishReason.STOP
                output.close()
        except Exception as error:  # noqa: BLE001 - a grammar library raises what it likes
            output.end = FinishReason.ERROR
            output.fail(f"{FIELD}: {describe(error)}")
