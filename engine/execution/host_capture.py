"""Captures a forward on a CPU: each call that computes is noted once, and a replay makes the same calls on
the same memory. What stands around them in Python, for small steps a third of the time, is not run again.

Law: a graph holds every call that writes, in order, and all memory that they name. What is decided on the
host by a tensor's content cannot be noted, and such work is refused. Calls of torch and of the native library
are seen, nothing else: the trial of a graph must show that there was nothing else.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.execution.native_library import NativeLibrary

MOST_BYTES = 1 << 27
"""That graphs may keep in all: each keeps what it computes on the way."""

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

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.kept: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Of the memory that is kept."""
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in self.kept}
        return sum(storages.values())

    def replay(self) -> None:
        """Raises what a call raises; `MemoryError` if a native one had no memory."""
        for call in self.calls:
            if call() == 1:
                raise MemoryError("a native operator got no memory")


class HostCapture:
    """Makes graphs of work that calls torch and, if there is one, `library`."""

    def __init__(self, library: NativeLibrary | None) -> None:
        self._library = library
        self._num_bytes = 0
        self._num_rows = 0

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        """Which of `sizes`, numbers of rows, to capture: the smallest first, as long as there is room."""
        for size in sizes:
            each = self._num_bytes / max(self._num_rows, 1)
            if self._num_bytes + each * size > MOST_BYTES:
                return
            self._num_rows += size
            yield size

    def __call__(self, work: Callable[[], None]) -> HostGraph:
        """Raises what `work` raises, and `CannotCapture`."""
        graph = HostGraph()
        with self._library.noting(graph.calls) if self._library else nullcontext(), _Noting(graph):
            work()
        self._num_bytes += graph.num_bytes
        return graph


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch types it not
    """Notes what is computed while it is active."""

    def __init__(self, graph: HostGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch types it not
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd):
            # Made of others, which are what is noted: one of them may read on the host.
            with self:
                return func.decompose(*args, **kwargs)
        if _reads_on_the_host(func, args):
            raise CannotCapture(f"{func} decides on the host by what a tensor holds")
        results = func(*args, **kwargs)
        tensors = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor)]
        if any(one.is_mkldnn for one in tensors):
            raise CannotCapture(f"{func} gives a tensor whose memory cannot be named")
        if func._schema.is_mutable:
            self._graph.calls.append(partial(_forgetting, partial(func, *args, **kwargs)))
        elif not _are_views(tensors, args, kwargs):
            self._graph.kept += tensors
            if func not in UNWRITTEN:
                self._graph.calls.append(_again(func, args, kwargs, tensors))
        return results


def _reads_on_the_host(func: Any, args: tuple[Any, ...]) -> bool:
    if func is aten.index.Tensor:
        # By numbers: the shape of the result follows from theirs. By a mask it does not.
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return any(tag in func.tags for tag in READS_ON_THE_HOST)


def _are_views(tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether results lie in what was given: they see what is written there."""
    given = {
        one.untyped_storage().data_ptr()
        for one in tree_leaves((args, kwargs))
        # What oneDNN has packed has no storage to name, and nothing else lies in it.
        if isinstance(one, torch.Tensor) and not one.is_mkldnn
    }
    return all(one.untyped_storage().data_ptr() in given for one in tensors)


def _again(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Call:
    """A call that computes the same into the same `tensors`."""
    into = _into(func)
    if into is not None and len(tensors) == 1:
        return partial(_forgetting, partial(into, *args, **kwargs, out=tensors[0]))
    return partial(_copied, partial(func, *args, **kwargs), tensors)


def _into(func: Any) -> Any | None:
    """The same operator that writes into `out`, if there is one with the same arguments."""
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
    fresh = [one for one in tree_leaves(call()) if isinstance(one, torch.Tensor)]
    for tensor, one in zip(tensors, fresh, strict=True):
        tensor.copy_(one)
