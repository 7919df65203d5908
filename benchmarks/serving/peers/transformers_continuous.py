"""The continuous batching of transformers, with its own thread and its own times of tokens."""

from typing import Any

from benchmarks.serving.protocol import Arrivals, Clock, Request, Served, Settings, serve

PAGE = 256
"""Its default."""
SECONDS_OF_SILENCE = 600.0


class Continuous:
    def load(self, settings: Settings) -> dict[str, Any]:
        import torch
        import transformers
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        torch.set_num_threads(settings.threads)
        # Typed as Any: transformers gives these no types.
        auto: Any = transformers.AutoModelForCausalLM
        make_config: Any = transformers.GenerationConfig
        model = auto.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        ).eval()
        model.to(settings.device)
        generation = make_config(do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=settings.kv_tokens // PAGE,
            max_batch_tokens=settings.token_budget,
            max_requests_per_batch=settings.max_seqs,
            auto_switch_to_flash=False,
            **settings.options,
        )
        self._manager = model.init_continuous_batching(generation, batching)
        self._manager.start()
        self._count = 0
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def run(self, requests: list[Request]) -> list[Served]:
        clock = Clock()
        arrivals = Arrivals(requests, clock)
        places: dict[str, int] = {}
        while not arrivals.are_over:
            arrivals.wait()
            for place, request in arrivals.due():
                self._count += 1
                name = f"request-{self._count}"
                places[name] = place
                self._manager.add_request(
                    request.prompt, name, request.max_tokens, record_timestamps=True, eos_token_id=-1
                )
        served = [Served([], []) for _ in requests]
        for _ in requests:
            result = self._manager.get_result(timeout=SECONDS_OF_SILENCE)
            if result is None:
                raise RuntimeError("no result: its thread has ended or is silent")
            if result.error:
                raise RuntimeError(result.error)
            times = [clock.at(moment) for moment in result.timestamps]
            served[places[result.request_id]] = Served(result.generated_tokens, times)
        return served


if __name__ == "__main__":
    serve(Continuous())
