"""Puts the parts together for a worker: a model's name goes in, all that an engine needs comes out.

Law: a limit that nobody set gets the default of `EngineConfig` or of the device, or what model and memory
allow; the values that hold are those of `Execution.config`. This file decides on limits only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.execution.loading.attention_backends import choose_backends
from engine.execution.loading.attention_self_check import with_checked_attention
from engine.execution.loading.default_model import DEFAULT_MODEL, default_model
from engine.execution.loading.generation_defaults import check_choice, describe_defaults, read_defaults
from engine.execution.loading.kv_sizing import (
    CPU_SHARE,
    CUDA_SHARE,
    PoolMemory,
    blocks_for,
    choose_num_kv_blocks,
    fit_model_len,
)
from engine.execution.loading.loader import LoadedModel, find_device, load_model
from engine.execution.loading.quantization_options import check_quantization, quantized_fingerprint
from engine.execution.machine.memory import free_bytes
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary, find_library
from engine.execution.plans import DETERMINISTIC, plain, quantized
from engine.execution.runner.async_runner import AsyncRunner, DeviceExecutor
from engine.execution.sampling.native_draw import choose_draw_operator
from engine.execution.sampling.sampler import Sampler
from engine.execution.text.llguidance_backend import LlguidanceBackend
from engine.execution.text.tokenizer import Tokenizer
from engine.execution.text.tokenizer_check import load_tokenizer
from engine.requests.grammar_compiler import GrammarCompiler
from engine.steps.fault_isolation import Runner
from engine.steps.pipeline import AsyncExecutor
from engine.validation import boolean

CUDA_LIMITS = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
"""Defaults on CUDA: what keeps a GPU busy. Those of `EngineConfig` are a CPU's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What `Engine` takes, and what a model card tells.

    `eos_token_ids`: all that end a text. `fingerprint`: the same files give the same string. `attention`: the
    name of the backend in use. `quantization`: how weights are kept, one of `QUANTIZATION`. `launcher`: None
    without asynchronous scheduling. `default_sampling`: fields of `SamplingParams` from the model's
    `generation_config.json`, for requests that do not give them.
    """

    runner: Runner
    sampler: Sampler
    tokenizer: Tokenizer
    grammar_compiler: GrammarCompiler
    config: EngineConfig
    eos_token_ids: frozenset[int]
    vocab_size: int
    fingerprint: str
    dtype: str
    device: str
    attention: str
    quantization: str
    launcher: AsyncExecutor | None = None
    default_sampling: Mapping[str, Any]

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens of one prompt and output: what the model's length and the KV pool allow."""
        return min(self.config.max_model_len, self.config.kv_capacity + 1)

    def new_engine(self) -> Engine:
        """An engine of its own; one at a time, as there is one pool."""
        return Engine(
            self.config,
            self.runner,
            self.sampler,
            self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.vocab_size,
            grammar_compiler=self.grammar_compiler,
            async_executor=self.launcher,
        )


def build_execution(
    model: str,
    *,
    cache_dir: Path | str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    deterministic: bool = False,
    attention: str = "auto",
    quantization: str = "none",
    decode_graphs: bool = True,
    async_scheduling: bool | None = None,
    kv_memory_share: float | None = None,
    generation_config: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
    **limits: Any,
) -> Execution:
    """Load a model and make it ready to run; a pass of one token has been run when this returns.

    `model`: a directory, a hub id, or `DEFAULT_MODEL`, which is converted once into `cache_dir`. `dtype`,
    `device`, `progress`: see `load_model`. `deterministic`: a sequence's logits are the same to the bit
    whatever else is computed, in whatever chunks, found in the cache or computed again; this is slower, and
    models for which it does not hold are refused. `attention`: "native", a CPU's operator that is compiled
    once into `cache_dir`; "triton", kernels for CUDA; "torch"; or "auto", the first of these that can be had
    and agrees with the model. `quantization`: "none", or on a CPU "int8" or "int4": weights take a quarter or
    a sixth of float32's memory, and logits change. `decode_graphs`: decode steps are captured while loading,
    where the attention allows it, and replayed; never with `deterministic`. `async_scheduling`: a step is
    decided and launched before the tokens of the one before it are on the host; None: on CUDA. On a CPU,
    which does a step where it is launched, tokens only come later by it. `generation_config`: "auto", the
    sampling defaults in the model's `generation_config.json` are followed; "none", they are not.

    `limits`: fields of `EngineConfig`; None leaves one to its default, but for fields that take None. On CUDA
    the defaults of `CUDA_LIMITS` hold.
    `max_model_len`: at most the model's own, which is the default. `num_kv_blocks`: by default enough for
    `max_num_seqs` sequences of `max_model_len`, but at most `kv_memory_share` of the memory that is free once
    the model is loaded (0.4 on a CPU, 0.85 on CUDA). A pool that does not hold one sequence of that
    length reduces it, and is refused with a `max_model_len` that was set.

    Raises `InvalidParameter`, or `UnsupportedModel` with the model's type and the reason.
    """
    given = _given_limits(limits)
    _check_options(deterministic, decode_graphs, async_scheduling, generation_config)
    # Checked before minutes are spent on loading; what is left open gets a value that passes.
    checked = EngineConfig(**{"max_model_len": 2, "num_kv_blocks": 1, **given})
    target = find_device(device)
    check_quantization(quantization, deterministic=deterministic, device=target)
    source = _source(model, cache_dir, progress)
    library = _native_library(target, cache_dir, deterministic, progress)
    backends = choose_backends(
        attention,
        deterministic=deterministic,
        device=target,
        library=library,
    )
    usable = library if isinstance(library, NativeLibrary) else None
    if quantization != "none":
        numerics = quantized(backends, usable, quantization, progress)
    elif deterministic:
        numerics = DETERMINISTIC
    else:
        numerics = plain(backends, usable, has_graphs=decode_graphs)
    loaded = load_model(
        source,
        backends=numerics.backends,
        prepare=numerics.prepare,
        finish=numerics.finish,
        dtype=dtype,
        device=device,
        progress=progress,
    )
    loaded = with_checked_attention(loaded, numerics.backends, checked.block_size)
    config = _engine_config(loaded, kv_memory_share, given, progress)
    tokenizer = load_tokenizer(
        loaded.directory, loaded.vocab_size, max_prompt_tokens=config.max_prompt_tokens
    )
    defaults = _default_sampling(loaded.directory, generation_config, progress)
    with _pool_memory(loaded, config, kv_memory_share).guard(config.num_kv_blocks):
        runner = numerics.make_runner(loaded, config, progress)
        runner.check()
    progress(f"attention: {loaded.backend.name}")
    progress(f"ready: {config.num_kv_blocks} KV blocks, {config.max_model_len} tokens a sequence")
    parts = _parts(runner, Sampler(choose_draw_operator(library)), loaded.device, async_scheduling)
    return replace(_execution(loaded, config, tokenizer, parts, quantization), default_sampling=defaults)


def _default_sampling(directory: Path, choice: str, progress: Callable[[str], None]) -> dict[str, Any]:
    """The model's own, if they are followed; what holds is reported either way."""
    if choice == "none":
        progress("generation_config.json is not followed")
        return {}
    defaults = read_defaults(directory)
    progress(describe_defaults(defaults))
    return defaults


def default_limits(device: torch.device) -> dict[str, int]:
    """The fields of `EngineConfig` whose defaults are others on `device`."""
    return dict(CUDA_LIMITS) if device.type == "cuda" else {}


def _check_options(
    deterministic: bool, decode_graphs: bool, async_scheduling: bool | None, generation_config: str
) -> None:
    boolean("deterministic", deterministic)
    boolean("decode_graphs", decode_graphs)
    if async_scheduling is not None:
        boolean("async_scheduling", async_scheduling)
    check_choice(generation_config)


def _given_limits(limits: dict[str, Any]) -> dict[str, Any]:
    """Those that were set. Every field of `EngineConfig` may be, so that none can be forgotten here.

    Raises `TypeError` for another name, as a call does.
    """
    known = {field.name: field for field in fields(EngineConfig)}
    if unknown := limits.keys() - known:
        raise TypeError(f"EngineConfig has no field {', '.join(sorted(unknown))}")
    return {
        name: value
        for name, value in limits.items()
        if value is not None or NoneType in get_args(known[name].type)
    }


class _Parts(NamedTuple):
    """What computes: the model's runner, what draws from its logits, and what launches both ahead, if any."""

    runner: Runner
    sampler: Sampler
    launcher: AsyncExecutor | None


def _parts(
    runner: AsyncRunner, sampler: Sampler, device: torch.device, async_scheduling: bool | None
) -> _Parts:
    is_ahead = device.type == "cuda" if async_scheduling is None else async_scheduling
    return _Parts(runner, sampler, DeviceExecutor(runner, sampler, device) if is_ahead else None)


def _execution(
    loaded: LoadedModel, config: EngineConfig, tokenizer: Tokenizer, parts: _Parts, quantization: str
) -> Execution:
    eos_token_ids = loaded.eos_token_ids or tokenizer.eos_token_ids
    grammars = LlguidanceBackend(tokenizer, vocab_size=loaded.vocab_size, eos_token_ids=eos_token_ids)
    if tokenizer.knows_bytes:
        # Here, and not with the first grammar: it keeps all other threads from running for a moment.
        grammars.load()
    return Execution(
        runner=parts.runner,
        sampler=parts.sampler,
        launcher=parts.launcher,
        tokenizer=tokenizer,
        grammar_compiler=GrammarCompiler(grammars),
        config=config,
        eos_token_ids=eos_token_ids,
        vocab_size=loaded.vocab_size,
        fingerprint=quantized_fingerprint(loaded.fingerprint, quantization),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        attention=loaded.backend.name,
        quantization=quantization,
        default_sampling={},
    )


def _native_library(
    device: torch.device, cache_dir: Path | str | None, deterministic: bool, progress: Callable[[str], None]
) -> NativeLibrary | CannotBuild:
    if device.type != "cpu":
        return CannotBuild(f"the native operators run on a CPU, not on {device.type}")
    if deterministic:
        return CannotBuild("deterministic numerics have operators of their own")
    return find_library(None if cache_dir is None else Path(cache_dir), progress)


def _source(model: str, cache_dir: Path | str | None, progress: Callable[[str], None]) -> str:
    if model != DEFAULT_MODEL or Path(model).is_dir():
        return model
    if cache_dir is None:
        raise InvalidParameter("cache_dir", f"must be set: {DEFAULT_MODEL} is converted into it")
    return str(default_model(Path(cache_dir), progress))


def _engine_config(
    loaded: LoadedModel, share: float | None, given: dict[str, Any], progress: Callable[[str], None]
) -> EngineConfig:
    """The limits that nobody set, from what the device, the model and the memory allow.

    A length that was not asked for is reduced to what the KV pool holds, so that no request is accepted that
    can never run; one that was asked for is refused with the numbers that would do.
    """
    given = {**default_limits(loaded.device), **given}
    length = model_length(loaded.max_model_len, given.get("max_model_len"))
    config = EngineConfig(**{"num_kv_blocks": 1, **given, "max_model_len": length})
    memory = _pool_memory(loaded, config, share)
    if "num_kv_blocks" in given:
        memory.check(config.num_kv_blocks)
    else:
        chosen = choose_num_kv_blocks(
            max_tokens=config.max_num_seqs * length,
            block_size=config.block_size,
            bytes_per_block=memory.bytes_per_block,
            free_bytes=free_bytes(loaded.device),
            share=memory.share,
        )
        config = replace(config, num_kv_blocks=chosen)
    fitting = fit_model_len(config, is_required="max_model_len" in given)
    if fitting < length:
        progress(
            f"max_model_len is {fitting} instead of the model's {length}: {config.num_kv_blocks} KV blocks"
            f" hold no more; num_kv_blocks={blocks_for(length, config.block_size)} would do"
        )
    return replace(config, max_model_len=fitting)


def _pool_memory(loaded: LoadedModel, config: EngineConfig, share: float | None) -> PoolMemory:
    if share is None:
        share = CUDA_SHARE if loaded.device.type == "cuda" else CPU_SHARE
    bytes_per_block = loaded.backend.bytes_per_block(loaded.layers, config.block_size, loaded.dtype)
    return PoolMemory(loaded.device, bytes_per_block, share)


def model_length(most: int | None, asked: int | None) -> int:
    """The longest sequence, from what the model takes and what was asked for. Raises `InvalidParameter`."""
    if asked is None:
        if most is None:
            raise InvalidParameter(
                "max_model_len", "must be set: the model does not state its longest length"
            )
        return most
    if most is not None and asked > most:
        raise InvalidParameter("max_model_len", f"is {asked}, but the model takes at most {most} tokens")
    return asked
