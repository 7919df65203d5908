"""The seconds of one start of a worker's engine, part by part: `python -m benchmarks.load MODEL CACHE`.

Law: this process is the start, so nothing of torch is imported before the clock runs. Run it twice: the first
start in a cache directory compiles and measures, and the second is what users feel.
"""

import argparse
import resource
import time

from worker.loading import gc_paused


class Parts:
    """Prints what ends now, and how long it took."""

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
    parser.add_argument("--threads", type=int, help="of torch; its own number if not given")
    given = parser.parse_args()
    parts = Parts()
    with gc_paused():
        import torch

        parts.end("import torch")
        from engine.execution.build import build_execution

        parts.end("import transformers and the engine")
    if given.threads:
        torch.set_num_threads(given.threads)
    last = ["find the library, try the operators"]

    def progress(line: str) -> None:
        parts.end(last[0])
        last[0] = line

    build_execution(given.model, cache_dir=given.cache, dtype=given.dtype, progress=progress).new_engine()
    parts.end(last[0])
    parts.end_all()


if __name__ == "__main__":
    main()
