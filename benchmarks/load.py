"""The time of each part of a worker's start: `python -m benchmarks.load MODEL CACHE`.

The clock starts before torch is imported. Run it twice: the first start in a cache directory compiles the
native operators, the second is what users see.
"""

import argparse
import resource
import time

from worker.loading import gc_paused


class Parts:
    """Prints each part and its seconds."""

    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()

    def end(self, part: str) -> None:
        now = time.perf_counter()
        print(f"{now - self._last:7.2f} s  {part}", flush=True)
        self._last = now

    def end_all(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        print(
            f"{time.perf_counter() - self._begun:7.2f} s  all;"
            f" processors {usage.ru_utime:.2f} s and {usage.ru_stime:.2f} s in the system;"
            f" at most {usage.ru_maxrss / 1024:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("cache")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="threads of torch; by default its own number")
    args = parser.parse_args()
    parts = Parts()
    with gc_paused():
        import torch

        parts.end("import torch")
        from engine.execution.build import build_execution

        parts.end("import transformers and the engine")
    if args.threads:
        torch.set_num_threads(args.threads)
    last = ["find the library, check the operators"]

    def progress(line: str) -> None:
        parts.end(last[0])
        last[0] = line

    build_execution(args.model, cache_dir=args.cache, dtype=args.dtype, progress=progress).new_engine()
    parts.end(last[0])
    parts.end_all()


if __name__ == "__main__":
    main()
