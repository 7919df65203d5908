"""Tokenmill's engine, stepped as its worker steps it."""

from typing import Any

from benchmarks.serving.protocol import Request, Served, Settings, drive, serve
from worker.loading import gc_paused


class Tokenmill:
    """`details["host_share"]`: the share of the steps that is neither the forward pass nor sampling."""

    def __init__(self) -> None:
        self.details: dict[str, float] = {}

    def load(self, settings: Settings) -> dict[str, Any]:
        with gc_paused():  # as a worker does
            import torch

            from engine.execution.build import build_execution

        torch.set_num_threads(settings.threads)
        limits = {
            "max_num_batched_tokens": settings.token_budget,
            "max_num_seqs": settings.max_seqs,
            "max_model_len": settings.max_model_len,
            "num_kv_blocks": settings.kv_tokens // 16,
        }
        execution = build_execution(
            settings.model,
            cache_dir=settings.scratch,
            dtype=settings.dtype,
            device=settings.device,
            **(limits | settings.options),
        )
        self._engine = execution.new_engine()
        return {"torch": torch.__version__, "attention": execution.attention}

    def run(self, requests: list[Request]) -> list[Served]:
        from engine.requests.engine_request import EngineRequest
        from engine.sampling_params import SamplingParams

        seconds = host_seconds = 0.0

        def add(place: int, request: Request) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            self._engine.add(EngineRequest(str(place), request.prompt, params, arrival_time=float(place)))

        def step() -> list[tuple[int, int]]:
            nonlocal seconds, host_seconds
            step = self._engine.step()
            report = step.report
            seconds += report.total_seconds
            host_seconds += report.total_seconds - report.execute_seconds - report.sample_seconds
            return [(int(one.request_id), one.token_id) for one in step.outputs if one.token_id is not None]

        served = drive(requests, add, step)
        while self._engine.has_work:
            self._engine.step()
        self.details = {"host_share": host_seconds / seconds if seconds else 0.0}
        return served


if __name__ == "__main__":
    serve(Tokenmill())
