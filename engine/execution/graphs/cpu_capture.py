"""Captures a forward on a CPU: each call that computes is noted once, and a replay makes the same calls on
the same memory. What stands around them in Python, for small steps a third of the time, is not run again.

Law: a graph holds every call that writes, in order, and the memory that they name lives as long. What is
decided on the host by a tensor's content cannot be noted, and such work is refused. Calls of torch and of the
native library are seen, nothing else: the trial of a graph must show that there was nothing else. Native
calls are noted and not made, so what work gives while it is captured means nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution.graphs.capture_arena import CaptureArena
from engine.execution.machine.native_library import NativeLibrary

MOST_BYTES = 1 << 27
"""Expected of the largest graph for what it computes on the way."""
ROOM_BYTES = 1 << 30
"""Of addresses: memory is taken only by what is used."""

aten = torch.ops.aten
UNWRITTEN = frozenset(
    {
        aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
        aten.new_empty.default, aten.new_empty_strided.default,
    }
)  # fmt: skip
"""Give memory and write nothing."""
READS_ON_THE_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

Call = Callable[[], object]


class CannotCapture(Exception):
    """The work reads a tensor on the host."""


class HostGraph:
    """Calls that were made once, and are made again by as many threads."""

    def __init__(self, memory: CaptureArena) -> None:
        self.calls: list[Call] = []
        #: Native calls name places in it by number.
        self._memory = memory

    def replay(self) -> None:
        """Raises what a call raises; `MemoryError` if a native one had no memory."""
        for call in self.calls:
            if call() == 1:
                raise MemoryError("a native operator got no memory")


class CpuCapture:
    """Makes graphs of work that calls torch and, if there is one, `library`. At most one of them runs at a
    time."""

    def __init__(self, library: NativeLibrary | None) -> None:
        self._library = library
        self._memory = CaptureArena(ROOM_BYTES)

    @property
    def num_bytes(self) -> int:
        """That all graphs use together."""
        return self._memory.most_bytes

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        """Which of `sizes`, numbers of rows, to capture: the smallest first, as long as there is room."""
        last = None
        for size in sizes:
            if last and self._memory.most_bytes * size > MOST_BYTES * last:
                return
            last = size
            yield size

    def __call__(self, work: Callable[[], None]) -> HostGraph:
        """Raises what `work` raises, `CannotCapture`, and `NoRoom`."""
        graph = HostGraph(self._memory)
        noting = _Noting(graph.calls, self._memory)
        with self._library.noting(graph.calls) if self._library else nullcontext(), noting:
            work()
        return graph


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types it not
    """Notes what is computed while it is active."""

    def __init__(self, calls: list[Call], memory: CaptureArena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types it not
        self._calls = calls
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = _operator(func)
        if operator.is_made_of_others:
            # They are what is noted: one of them may read on the host.
            with self:
                return func.decompose(*args, **kwargs)
        if operator.reads_on_the_host or (operator.is_index and _is_by_mask(args)):
            raise CannotCapture(f"{func} decides on the host by what a tensor holds")
        results = func(*args, **kwargs)
        if any(one.layout != torch.strided for one in _tensors_in((results,))):
            raise CannotCapture(f"{func} gives a tensor whose memory cannot be named")
        if operator.is_mutable:
            self._calls.append(partial(_forgetting, self._named(func, args, kwargs)))
            return results
        if operator.gives_views or _are_views(_tensors_in((results,)), args, kwargs):
            return results
        placed = _replaced(results, self._placed)
        if operator.is_written:
            self._note_results(operator, self._named(func, args, kwargs), _tensors_in((placed,)))
        return placed

    def _note_results(self, operator: "_Operator", call: "partial[Any]", tensors: list[torch.Tensor]) -> None:
        names = [self._memory.name(one) for one in tensors]
        if operator.into is not None and len(names) == 1:
            into = partial(operator.into, *call.args, **call.keywords, out=names[0])
            self._calls.append(partial(_forgetting, into))
        else:
            self._calls.append(partial(_copied, call, names))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        # What has no numbers is never written, and is kept by those who read it.
        return self._memory.copy_of(tensor) if tensor.numel() else tensor

    def _named(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "partial[Any]":
        """The call for a replay."""
        name = self._memory.name
        named = {key: _replaced(value, name) for key, value in kwargs.items()}
        return partial(func, *(_replaced(value, name) for value in args), **named)


class _Operator(NamedTuple):
    """What an operator of torch says of itself.

    `is_index`: whether it reads on the host depends on what it is given. `gives_views`: its results lie in
    what it is given. `is_written`: it gives more than memory. `into`: the same operator that writes into
    `out`, if there is one with the same arguments.
    """

    is_made_of_others: bool
    is_index: bool
    reads_on_the_host: bool
    is_mutable: bool
    gives_views: bool
    is_written: bool
    into: Any | None


@cache
def _operator(func: Any) -> _Operator:
    """Asked once for each: a forward calls the same few many times."""
    results = func._schema.returns
    is_index, is_written = func is aten.index.Tensor, func not in UNWRITTEN
    return _Operator(
        is_made_of_others=func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd),
        is_index=is_index,
        reads_on_the_host=not is_index and any(tag in func.tags for tag in READS_ON_THE_HOST),
        is_mutable=func._schema.is_mutable,
        gives_views=bool(results) and all(one.alias_info is not None for one in results),
        is_written=is_written,
        into=_into(func) if is_written else None,
    )


def _is_by_mask(args: tuple[Any, ...]) -> bool:
    """By numbers the shape of the result follows from theirs. By a mask it does not."""
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _are_views(tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether results lie in what was given: they see what is written there. Some do that do not say so."""
    # What oneDNN has packed has no storage to name, and nothing else lies in it.
    given = {
        one.untyped_storage().data_ptr()
        for one in _tensors_in((*args, *kwargs.values()))
        if one.layout == torch.strided
    }
    return all(one.untyped_storage().data_ptr() in given for one in tensors)


def _tensors_in(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """In arguments or results of an operator: tensors, sequences of tensors, and what is neither."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


def _replaced(value: Any, by: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same, with other tensors in the places that `_tensors_in` knows."""
    if isinstance(value, torch.Tensor):
        return by(value)
    if isinstance(value, list | tuple):
        return type(value)(by(one) if isinstance(one, torch.Tensor) else one for one in value)
    return value


def _into(func: Any) -> Any | None:
    packet, overload = func.overloadpacket, func._overloadname
    wanted = [argument.name for argument in func._schema.arguments]
    for name in (f"{overload}_out", "out"):
        into = getattr(packet, name, None)
        if into is None:
            continue
        arguments = into._schema.arguments
        if [one.name for one in arguments if not one.is_out] == wanted and arguments[-1].name == "out":
            return into
    return None


def _forgetting(call: Callable[[], object]) -> None:
    call()


def _copied(call: Callable[[], Any], tensors: list[torch.Tensor]) -> None:
    for tensor, one in zip(tensors, _tensors_in((call(),)), strict=True):
        tensor.copy_(one)
