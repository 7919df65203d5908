"""Captures work in CUDA graphs.

The graphs of one `CudaCapture` share a memory pool, so a graph may run only after the results of the previous
one are consumed; on one stream this always holds. The current stream is restored after a capture, even a
failed one.
"""

from collections.abc import Callable, Iterator

import torch

NUM_WARM_UPS = 2
"""Runs before a capture, in which libraries create handles and workspaces and kernels are compiled and tuned;
none of this is allowed during a capture."""


class CudaCapture:
    """Makes graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch

    def order(self, sizes: tuple[int, ...]) -> Iterator[int]:
        """All sizes, the largest first, whose memory the smaller ones reuse."""
        return reversed(sizes)

    def __call__(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Raises what `work` raises, and CUDA's errors for work that cannot be captured."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # `torch.cuda.graph` alone leaves its stream current when a capture fails.
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                work()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device: only calls of this thread are captured.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph
