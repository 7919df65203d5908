"""`generate` of transformers: requests one by one, or in padded batches of requests of like output lengths.

Option `batch_size`: 1, or how many make a batch. A batch takes the requests in the order of their output
lengths, and runs as long as its longest; what a shorter one gets beyond its length is dropped.
"""

import time
from typing import Any

from benchmarks.serving.protocol import Arrivals, Clock, Request, Served, Settings, serve

PAD = 0


class Generate:
    def load(self, settings: Settings) -> dict[str, Any]:
        import torch
        import transformers

        torch.set_num_threads(settings.threads)
        self._device = settings.device
        self._batch_size = settings.options["batch_size"]
        # Typed as Any: transformers gives these no types.
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        )
        self._model = model.to(self._device).eval()
        # Otherwise the model's own ends are put back where none are asked for.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = PAD
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def run(self, requests: list[Request]) -> list[Served]:
        served = [Served([], []) for _ in requests]
        clock = Clock()
        arrivals = Arrivals(requests, clock)
        while not arrivals.are_over:
            arrivals.wait()
            line = sorted(arrivals.due(), key=lambda one: one[1].max_tokens)
            if self._batch_size == 1:
                line.sort(key=lambda one: one[0])
            for start in range(0, len(line), self._batch_size):
                batch = line[start : start + self._batch_size]
                for (place, _), result in zip(
                    batch, self._batch([one for _, one in batch], clock), strict=True
                ):
                    served[place] = result
        return served

    def _batch(self, requests: list[Request], clock: Clock) -> list[Served]:
        import torch

        longest = max(len(one.prompt) for one in requests)
        rows = [[PAD] * (longest - len(one.prompt)) + one.prompt for one in requests]
        mask = [[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in requests]
        moments: list[float] = []

        def note(ids: Any, _: Any, **__: Any) -> Any:
            moments.append(clock.at(time.perf_counter()))
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

        with torch.inference_mode():
            tokens = self._model.generate(
                torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=max(one.max_tokens for one in requests),
                do_sample=False,
                stopping_criteria=[note],
            )
        rows = tokens[:, longest:].tolist()
        return [
            Served(row[: one.max_tokens], moments[: one.max_tokens])
            for row, one in zip(rows, requests, strict=True)
        ]


if __name__ == "__main__":
    serve(Generate())
