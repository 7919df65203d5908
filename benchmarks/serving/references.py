"""Computes the reference tokens: transformers' `generate`, one request at a time, in the same dtype.

References are computed once per model, dtype and workload, and kept in a file whose name has a hash of the
prompts.
"""

import hashlib
import json
from pathlib import Path

from benchmarks.serving.children import Failed
from benchmarks.serving.engine_processes import EngineProcesses
from benchmarks.serving.plan import Group
from benchmarks.serving.systems import REFERENCE
from benchmarks.serving.workloads import Workload

CHECKED_REQUESTS = 8


class References:
    """`directory`: of the files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: Those that could not be had, with the reason: not tried again for every engine.
        self._hopeless: dict[Path, str] = {}

    def tokens(
        self, engines: EngineProcesses, group: Group, workload: Workload, warm_up: Workload, limit: float
    ) -> list[list[int]]:
        """Of the workload's first requests. Raises `Failed` when the reference cannot be run within `limit`
        seconds; what is kept already takes none."""
        checked = workload.first(CHECKED_REQUESTS)
        file = self._directory / f"{group.model}-{group.dtype}-{workload.name}-{fingerprint(checked)}.json"
        if file in self._hopeless:
            raise Failed(self._hopeless[file])
        if not file.exists():
            try:
                served = self._served(engines, checked, warm_up, limit)
            except Failed as error:
                self._hopeless[file] = str(error)
                raise
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(served))
        tokens: list[list[int]] = json.loads(file.read_text())
        return tokens

    @staticmethod
    def _served(
        engines: EngineProcesses, workload: Workload, warm_up: Workload, limit: float
    ) -> list[list[int]]:
        if not limit:
            raise Failed("no time was left for it")
        engines.prepare(REFERENCE, warm_up, load_limit=limit, limit=limit)
        answer, _ = engines.serve(REFERENCE, workload, limit)
        tokens: list[list[int]] = answer.message["tokens"]
        return tokens


def fingerprint(workload: Workload) -> str:
    said = json.dumps([(request.prompt, request.max_tokens) for request in workload.requests])
    return hashlib.sha256(said.encode()).hexdigest()[:12]
