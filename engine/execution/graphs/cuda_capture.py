"""Captures device work as CUDA graphs.

Law: after `capture`, whether it raised or not, the current stream is the one that it was before. Graphs of
one `CudaCapture` share one pool of memory, so one may run only when the one before it is done with what it
gave; on one stream that is always so.
"""

from collections.abc import Callable, Iterator

import torch

WARM_UPS = 2
"""Runs before a capture: libraries make their handles and workspaces, and kernels are compiled and tuned, all
of which may not happen while a graph is captured."""


class CudaCapture:
    """Makes graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch types it not

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        """All, the largest first: the others find its memory, and need no more."""
        return reversed(sizes)

    def __call__(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Raises what `work` raises, and what CUDA says of work that cannot be captured."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # `torch.cuda.graph` alone leaves its own stream current when a capture fails.
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                work()
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the device: only this one's calls are part of the graph.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph
