"""Captures a forward pass on a CPU: records every call that computes, and replays the calls on the same
memory.

A replay does not run the Python code around the calls, a third of the time of small steps. A graph keeps the
memory of its calls alive. Work whose calls depend on the content of a tensor is refused. Only calls of torch
and of the native library are recorded; the self-check of a graph detects other effects. Native calls are not
made while they are recorded, so the results of a capture are meaningless.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution.graphs.capture_arena import CaptureArena
from engine.execution.machine.native_library import NativeLibrary

MAX_BYTES = 1 << 27
"""Maximum estimated size of the intermediate results of a graph."""
ARENA_BYTES = 1 << 30
"""Address space of the arena; only used memory is allocated."""

aten = torch.ops.aten
UNWRITTEN = frozenset(
    {
        aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
        aten.new_empty.default, aten.new_empty_strided.default,
    }
)  # fmt: skip
"""Allocate memory without writing it."""
READS_ON_THE_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

Call = Callable[[], object]


class CannotCapture(Exception):
    """The work depends on the content of a tensor."""


class CpuGraph:
    """Recorded calls."""

    def __init__(self, arena: CaptureArena) -> None:
        self.calls: list[Call] = []
        #: Kept alive for the addresses in native calls.
        self._arena = arena

    def replay(self) -> None:
        """Raises what a call raises, and `MemoryError` if a native call could not allocate memory."""
        for call in self.calls:
            if call() == 1:
                raise MemoryError("a native operator could not allocate memory")


class CpuCapture:
    """Makes graphs of work that calls torch and `library`. At most one of the graphs may run at a time."""

    def __init__(self, library: NativeLibrary | None) -> None:
        self._library = library
        self._arena = CaptureArena(ARENA_BYTES)

    @property
    def num_bytes(self) -> int:
        """Memory of the intermediate results of all graphs."""
        return self._arena.peak_bytes

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        """The numbers of rows to capture, the smallest first, while the next one probably fits."""
        last = None
        for size in sizes:
            if last and self._arena.peak_bytes * size > MAX_BYTES * last:
                return
            last = size
            yield size

    def __call__(self, work: Callable[[], None]) -> CpuGraph:
        """Raises what `work` raises, `CannotCapture` and `ArenaFull`."""
        graph = CpuGraph(self._arena)
        recorder = _Recorder(graph.calls, self._arena)
        with self._library.recording(graph.calls) if self._library else nullcontext(), recorder:
            work()
        return graph


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Records the operators that are called while it is active."""

    def __init__(self, calls: list[Call], arena: CaptureArena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._calls = calls
        self._arena = arena

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = _operator(func)
        if operator.is_composite:
            # Its parts are recorded, since one of them may read on the host.
            with self:
                return func.decompose(*args, **kwargs)
        if operator.reads_on_the_host or (operator.is_index and _is_by_mask(args)):
            raise CannotCapture(f"{func} depends on the content of a tensor")
        results = func(*args, **kwargs)
        if any(one.layout != torch.strided for one in _tensors_in((results,))):
            raise CannotCapture(f"{func} returns a tensor that is not strided")
        if operator.is_mutable:
            self._calls.append(partial(_discard, self._bind(func, args, kwargs)))
            return results
        if operator.returns_views or _are_views(_tensors_in((results,)), args, kwargs):
            return results
        moved = _map_tensors(results, self._move)
        if operator.writes:
            self._record_results(operator, self._bind(func, args, kwargs), _tensors_in((moved,)))
        return moved

    def _record_results(
        self, operator: "_Operator", call: "partial[Any]", tensors: list[torch.Tensor]
    ) -> None:
        targets = [self._arena.unowned(one) for one in tensors]
        if operator.out_variant is not None and len(targets) == 1:
            write = partial(operator.out_variant, *call.args, **call.keywords, out=targets[0])
            self._calls.append(partial(_discard, write))
        else:
            self._calls.append(partial(_copy_results, call, targets))

    def _move(self, tensor: torch.Tensor) -> torch.Tensor:
        # An empty tensor is never written, and the calls that read it keep it.
        return self._arena.copy_of(tensor) if tensor.numel() else tensor

    def _bind(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "partial[Any]":
        """The call of a replay, which does not keep regions of the arena."""
        unowned = self._arena.unowned
        keywords = {key: _map_tensors(value, unowned) for key, value in kwargs.items()}
        return partial(func, *(_map_tensors(value, unowned) for value in args), **keywords)


class _Operator(NamedTuple):
    """Properties of a torch operator.

    `is_index`: reads on the host only for some arguments. `returns_views`: its results alias its arguments.
    `writes`: it does more than allocate. `out_variant`: the variant with the same arguments that writes to
    `out`, if there is one.
    """

    is_composite: bool
    is_index: bool
    reads_on_the_host: bool
    is_mutable: bool
    returns_views: bool
    writes: bool
    out_variant: Any | None


@cache
def _operator(func: Any) -> _Operator:
    results = func._schema.returns
    is_index, writes = func is aten.index.Tensor, func not in UNWRITTEN
    return _Operator(
        is_composite=func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd),
        is_index=is_index,
        reads_on_the_host=not is_index and any(tag in func.tags for tag in READS_ON_THE_HOST),
        is_mutable=func._schema.is_mutable,
        returns_views=bool(results) and all(one.alias_info is not None for one in results),
        writes=writes,
        out_variant=_out_variant(func) if writes else None,
    )


def _is_by_mask(args: tuple[Any, ...]) -> bool:
    """Whether a tensor is indexed by a mask, whose content determines the shape of the result."""
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


def _are_views(tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the results alias the arguments. Not every operator declares it."""
    # Weights packed by oneDNN have no storage, and nothing aliases them.
    storages = {
        one.untyped_storage().data_ptr()
        for one in _tensors_in((*args, *kwargs.values()))
        if one.layout == torch.strided
    }
    return all(one.untyped_storage().data_ptr() in storages for one in tensors)


def _tensors_in(values: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors, and tensors in sequences, among the arguments or results of an operator."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same value, with `function` applied to the tensors that `_tensors_in` finds."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(function(one) if isinstance(one, torch.Tensor) else one for one in value)
    return value


def _out_variant(func: Any) -> Any | None:
    packet, overload = func.overloadpacket, func._overloadname
    wanted = [argument.name for argument in func._schema.arguments]
    for name in (f"{overload}_out", "out"):
        variant = getattr(packet, name, None)
        if variant is None:
            continue
        arguments = variant._schema.arguments
        if [one.name for one in arguments if not one.is_out] == wanted and arguments[-1].name == "out":
            return variant
    return None


def _discard(call: Callable[[], object]) -> None:
    """Returns None: a native call returns 1 on failure, which a torch result must not be compared with."""
    call()


def _copy_results(call: Callable[[], Any], tensors: list[torch.Tensor]) -> None:
    for tensor, one in zip(tensors, _tensors_in((call(),)), strict=True):
        tensor.copy_(one)
