"""CTranslate2: batches of requests of like output lengths, with the times of its callback.

Option `batch_size`. Its generator takes the names of tokens, so the names of the converted vocabulary are
used. A batch runs as long as its longest output; what a shorter one gets beyond its length is dropped.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.serving.protocol import Clock, Request, Served, Settings, serve


class CTranslate2:
    def load(self, settings: Settings) -> dict[str, Any]:
        import ctranslate2

        directory = converted(settings)
        known = ctranslate2.get_supported_compute_types("cpu")
        if settings.dtype not in known:
            raise RuntimeError(f"no {settings.dtype} on this processor, only {', '.join(sorted(known))}")
        self._batch_size = settings.options["batch_size"]
        self._names: list[str] = json.loads((directory / "vocabulary.json").read_text())
        self._generator = ctranslate2.Generator(
            str(directory), device="cpu", compute_type=settings.dtype, intra_threads=settings.threads
        )
        return {"ctranslate2": ctranslate2.__version__, "compute_type": self._generator.compute_type}

    def run(self, requests: list[Request]) -> list[Served]:
        served = [Served([], []) for _ in requests]
        clock = Clock()
        line = sorted(range(len(requests)), key=lambda place: requests[place].max_tokens)
        for start in range(0, len(line), self._batch_size):
            places = line[start : start + self._batch_size]
            results = self._batch([requests[place] for place in places], clock)
            for place, result in zip(places, results, strict=True):
                served[place] = result
        return served

    def _batch(self, requests: list[Request], clock: Clock) -> list[Served]:
        times: list[list[float]] = [[] for _ in requests]

        def note(step: Any) -> bool:
            times[step.batch_id].append(clock.at(time.perf_counter()))
            return False

        longest = max(one.max_tokens for one in requests)
        results = self._generator.generate_batch(
            [[self._names[token] for token in one.prompt] for one in requests],
            max_length=longest,
            min_length=longest,
            beam_size=1,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=note,
        )
        return [
            Served(result.sequences_ids[0][: one.max_tokens], moments[: one.max_tokens])
            for result, moments, one in zip(results, times, requests, strict=True)
        ]


def converted(settings: Settings) -> Path:
    """The model's directory in the form of CTranslate2, made if it is not there; float32 for all dtypes."""
    from ctranslate2.converters import TransformersConverter

    source = Path(settings.model)
    directory = Path(settings.scratch) / "ctranslate2" / source.name
    if not directory.is_dir():
        unfinished = directory.with_suffix(".unfinished")
        TransformersConverter(str(source)).convert(str(unfinished), force=True)
        os.replace(unfinished, directory)
    return directory


if __name__ == "__main__":
    serve(CTranslate2())
