"""llama.cpp through its C interface: many sequences in one context, batched as its server batches them.

Each step takes one token of every sequence that decodes, then prompts in order as far as the budget goes. The
cache has the model's dtype.
"""

import ctypes
import importlib.metadata
import os
from pathlib import Path
from typing import Any

from benchmarks.serving.protocol import Request, Served, Settings, drive, serve

F32, BF16 = 0, 30
"""Numbers of ggml's types."""


class Sequence:
    """`known`: prompt and output; `computed` of them are in the cache, in the place `slot`."""

    __slots__ = ("computed", "known", "length", "place", "slot")

    def __init__(self, place: int, request: Request) -> None:
        self.place, self.known, self.computed, self.slot = place, list(request.prompt), 0, -1
        self.length = len(request.prompt) + request.max_tokens


class LlamaCpp:
    def load(self, settings: Settings) -> dict[str, Any]:
        import llama_cpp

        self._api = llama_cpp
        self._budget = settings.token_budget
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(converted(settings)).encode(), model_params)
        if not self._model:
            raise RuntimeError("the model cannot be loaded")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.kv_tokens
        params.n_batch = params.n_ubatch = settings.token_budget
        params.n_seq_max = settings.max_seqs
        params.n_threads = params.n_threads_batch = settings.threads
        # One cache for all sequences, or an equal share for each.
        params.kv_unified = settings.options["kv_unified"]
        params.type_k = params.type_v = F32 if settings.dtype == "float32" else BF16
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("no context: see the log")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(settings.token_budget, 0, 1)
        self._slots = list(range(settings.max_seqs))
        return {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}

    def run(self, requests: list[Request]) -> list[Served]:
        waiting: list[Sequence] = []
        running: list[Sequence] = []

        def add(place: int, request: Request) -> None:
            waiting.append(Sequence(place, request))

        def step() -> list[tuple[int, int]]:
            while waiting and self._slots:
                running.append(waiting.pop(0))
                running[-1].slot = self._slots.pop()
            tokens = self._step(running)
            for one in [one for one in running if len(one.known) == one.length]:
                self._release(one)
                running.remove(one)
            return tokens

        return drive(requests, add, step)

    def _step(self, running: list[Sequence]) -> list[tuple[int, int]]:
        """Compute one batch; the tokens that came of it."""
        batch = self._batch
        batch.n_tokens = 0
        sampled: list[tuple[Sequence, int]] = []
        for one in sorted(running, key=lambda one: len(one.known) - one.computed > 1):
            new = min(len(one.known) - one.computed, self._budget - batch.n_tokens)
            for at in range(one.computed, one.computed + new):
                self._put(one.known[at], at, one.slot, is_last=at + 1 == len(one.known))
            one.computed += new
            if new and one.computed == len(one.known):
                sampled.append((one, batch.n_tokens - 1))
        if code := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        tokens = []
        for one, row in sampled:
            one.known.append(self._likeliest(row))
            tokens.append((one.place, one.known[-1]))
        return tokens

    def _put(self, token: int, position: int, slot: int, *, is_last: bool) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row] = token, position
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot
        batch.logits[row] = is_last
        batch.n_tokens = row + 1

    def _likeliest(self, row: int) -> int:
        import numpy as np

        pointer = self._api.llama_get_logits_ith(self._context, row)
        values = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(values, shape=(self._vocab_size,)).argmax())

    def _release(self, one: Sequence) -> None:
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_seq_rm(memory, one.slot, -1, -1)
        self._slots.append(one.slot)


def converted(settings: Settings) -> Path:
    """The model's GGUF file, made if it is not there."""
    from benchmarks.serving.peers.gguf_file import write_gguf

    directory = Path(settings.model)
    file = Path(settings.scratch) / "gguf" / f"{directory.name}-{settings.dtype}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        write_gguf(directory, unfinished, settings.dtype)
        os.replace(unfinished, file)
    return file


if __name__ == "__main__":
    serve(LlamaCpp())
