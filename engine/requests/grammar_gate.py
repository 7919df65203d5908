"""Holds requests until their grammar is compiled. The engine's step never waits for a compilation.

A grammar that does not compile fails only its own request.
"""

import itertools
from dataclasses import replace
from typing import Protocol

from engine.errors import InvalidParameter
from engine.requests.grammar_compiler import Compiled, GrammarFactory
from engine.requests.request_state import OutputState, RequestState, describe
from engine.requests.stop_rules import StopRules
from engine.sequence import FinishReason
from engine.structured_outputs import FIELD, StructuredOutputs

IDLE_WAIT_SECONDS = 0.01
"""How long a step without other work waits for a grammar, so that it does not spin."""


class GrammarCompiler(Protocol):
    """Compiles grammars in the background. Errors in a grammar are reported by `pop_ready`."""

    def submit(self, key: str, structured_outputs: StructuredOutputs) -> None:
        """Start compiling; returns at once. `pop_ready` reports `key` once, unless it is cancelled.

        Raises `InvalidParameter` if this model supports no grammars.
        """
        ...

    def pop_ready(self) -> list[tuple[str, Compiled]]:
        """The results since the last call, by key."""
        ...

    def cancel(self, key: str) -> None: ...

    def wait(self, seconds: float) -> None:
        """Return when something is ready, after `seconds` at the latest."""
        ...


class GrammarGate:
    """Requests that wait for their grammar. Without a compiler, structured outputs are refused."""

    def __init__(self, compiler: GrammarCompiler | None, rules: StopRules) -> None:
        self._compiler = compiler
        self._rules = rules
        self._serials = itertools.count()
        self._waiting: dict[str, RequestState] = {}
        self._keys: dict[RequestState, str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, structured_outputs: StructuredOutputs | None) -> None:
        """Raises `InvalidParameter` for structured outputs without a compiler."""
        if structured_outputs is not None and self._compiler is None:
            raise InvalidParameter(FIELD, "this engine has no grammar compiler")

    def submit(self, request: RequestState) -> None:
        """Start compiling the grammar of a request that needs one.

        Raises what the compiler raises; the caller cancels the request then.
        """
        if self._compiler and request.params.structured_outputs is not None:
            # A request that was discarded may be added again under the same id.
            key = f"{request.request_id} {next(self._serials)}"
            # Before the call, so that `cancel` finds the key if the call raises.
            self._waiting[key] = request
            self._keys[request] = key
            self._compiler.submit(key, request.params.structured_outputs)

    def cancel(self, request: RequestState) -> None:
        """Stop waiting for the grammar of `request`; does nothing if it waits for none."""
        if self._compiler and (key := self._keys.pop(request, None)):
            del self._waiting[key]
            self._compiler.cancel(key)

    def pop_compiled(self, *, is_idle: bool) -> list[tuple[RequestState, str | None]]:
        """Requests whose compilation has finished, each with an error message or None.

        The outputs of those without an error have their grammars. `is_idle`: the engine has no other work, so
        wait a moment.
        """
        assert self._compiler is not None, "nothing is submitted without a compiler"
        if is_idle:
            self._compiler.wait(IDLE_WAIT_SECONDS)
        return [self._resolve(key, compiled) for key, compiled in self._compiler.pop_ready()]

    def _resolve(self, key: str, compiled: Compiled) -> tuple[RequestState, str | None]:
        request = self._waiting.pop(key)
        del self._keys[request]
        if isinstance(compiled, str):
            return request, f"{FIELD}: {compiled}"
        for output in request.outputs:
            self._attach_grammar(output, compiled)
        return request, None

    def _attach_grammar(self, output: OutputState, make: GrammarFactory) -> None:
        """Advance a new grammar by the output's tokens; a resumed output may be complete already."""
        sequence = output.sequence
        try:
            sequence.constraints = replace(sequence.constraints, grammar=make())
            if self._rules.has_completed_grammar(sequence):
                output.resumed_finish_reason = FinishReason.STOP
                output.flush()
        except Exception as error:  # noqa: BLE001 - a grammar library may raise anything
            output.resumed_finish_reason = FinishReason.ERROR
            output.fail(f"{FIELD}: {describe(error)}")
