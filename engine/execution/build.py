"""Builds everything an engine needs from a model's name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import torch

from engine.checkpoint.generation_defaults import describe_defaults, read_defaults
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidParameter
from engine.execution.loading.attention_backends import choose_backends
from engine.execution.loading.attention_self_check import with_checked_attention
from engine.execution.loading.default_model import DEFAULT_MODEL, default_model
from engine.execution.loading.limits import pool_memory, resolve_limits
from engine.execution.loading.loader import LoadedModel, find_device, load_model
from engine.execution.machine.native_build import CannotBuild
from engine.execution.machine.native_library import NativeLibrary, find_library
from engine.execution.plans import (
    DETERMINISTIC,
    ExecutionPlan,
    Progress,
    check_quantization,
    plain,
    quantized,
)
from engine.execution.runner.async_runner import DeviceExecutor
from engine.execution.sampling.native_draw import choose_draw_operator
from engine.execution.sampling.sampler import Sampler
from engine.execution.text.llguidance_backend import LlguidanceBackend
from engine.execution.text.tokenizer import Tokenizer, load_tokenizer
from engine.requests.grammar_compiler import GrammarCompilerPool
from engine.steps.fault_isolation import Runner
from engine.steps.pipeline import AsyncExecutor
from engine.validation import Boolean, excerpt

GENERATION_CONFIG = ("auto", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The parts of an engine, and what a model card states.

    `eos_token_ids`: all ids that end a text. `fingerprint`: identifies the model and its quantization.
    `attention`: the backend in use. `async_executor`: None without asynchronous scheduling.
    `default_sampling`: fields of `SamplingParams` from the model's `generation_config.json`, for requests
    that do not set them.
    """

    runner: Runner
    sampler: Sampler
    tokenizer: Tokenizer
    grammar_compiler: GrammarCompilerPool
    config: EngineConfig
    eos_token_ids: frozenset[int]
    vocab_size: int
    fingerprint: str
    dtype: str
    device: str
    attention: str
    quantization: str
    async_executor: AsyncExecutor | None = None
    default_sampling: Mapping[str, Any]

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens of one prompt with its output: limited by the model's length and the KV pool."""
        return min(self.config.max_model_len, self.config.kv_capacity + 1)

    def new_engine(self) -> Engine:
        """A new engine. Engines of one execution share its KV pool, so only one may be in use."""
        return Engine(
            self.config,
            self.runner,
            self.sampler,
            self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.vocab_size,
            grammar_compiler=self.grammar_compiler,
            async_executor=self.async_executor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """How a model is loaded and run. Raises `InvalidParameter`.

    `cache_dir`: for the converted default model and compiled operators. `dtype`, `device`: see `find_dtype`,
    `find_device`. `deterministic`: a sequence's logits are bit-identical whatever else is computed, in any
    chunks, cached or recomputed; slower, and refused for models that cannot. `attention`: "native", an
    operator for CPUs that is compiled once; "triton", kernels for CUDA; "torch"; or "auto", the first of
    these that is available and agrees with the model. `quantization`: "none", or on a CPU "int8" or "int4",
    which take a quarter or a sixth of float32's memory and change logits. `decode_graphs`: decode steps are
    captured while loading and replayed, where the attention allows it; never with `deterministic`.
    `async_scheduling`: a step is launched before the tokens of the previous one are on the host; None: on
    CUDA only, since on a CPU it only delays tokens. `kv_memory_share`: share of the free memory for the KV
    pool; None: 0.4 on a CPU, 0.85 on CUDA. `generation_config`: "auto" applies the sampling defaults in the
    model's `generation_config.json`, "none" ignores them.
    """

    cache_dir: Path | str | None = None
    dtype: str = "auto"
    device: str = "auto"
    deterministic: bool = False
    attention: str = "auto"
    quantization: str = "none"
    decode_graphs: bool = True
    async_scheduling: bool | None = None
    kv_memory_share: float | None = None
    generation_config: str = "auto"

    def __post_init__(self) -> None:
        Boolean().check("deterministic", self.deterministic)
        Boolean().check("decode_graphs", self.decode_graphs)
        if self.async_scheduling is not None:
            Boolean().check("async_scheduling", self.async_scheduling)
        if self.generation_config not in GENERATION_CONFIG:
            names = " or ".join(GENERATION_CONFIG)
            reason = f"must be {names}, not {excerpt(self.generation_config)}"
            raise InvalidParameter("generation_config", reason)


def build_execution(
    model: str, *, progress: Callable[[str], None] = lambda _: None, **settings: Any
) -> Execution:
    """Load a model and make it ready to run; a forward pass of one token has run when this returns.

    `model`: a directory, a hub id, or `DEFAULT_MODEL`. `progress`: receives log lines. `settings`: fields of
    `ExecutionOptions` and of `EngineConfig`. None leaves a limit to its default, unless None is one of its
    values. Defaults of limits: `CUDA_LIMITS` on CUDA; `max_model_len`: the model's own, reduced to what the
    KV pool holds; `num_kv_blocks`: enough for `max_num_seqs` sequences of `max_model_len`, within
    `kv_memory_share`.

    Raises `InvalidParameter`, or `UnsupportedModel` with the model's type and the reason.
    """
    options, limits = _split(settings)
    # Checks the limits before minutes are spent on loading; those that are not set get valid values.
    checked = EngineConfig(**{"max_model_len": 2, "num_kv_blocks": 1, **limits})
    device = find_device(options.device)
    check_quantization(options.quantization, deterministic=options.deterministic, device=device)
    source = _source(model, options, progress)
    library = _native_library(options, device, progress)
    plan = _choose_plan(options, device, library, progress)
    loaded = _load(source, plan, options, progress)
    loaded = with_checked_attention(loaded, plan.backends, checked.block_size)
    config = resolve_limits(loaded, options.kv_memory_share, limits, progress)
    tokenizer = load_tokenizer(
        loaded.directory, loaded.vocab_size, max_prompt_tokens=config.max_prompt_tokens
    )
    default_sampling = _default_sampling(loaded.directory, options, progress)
    with pool_memory(loaded, config, options.kv_memory_share).guard(config.num_kv_blocks):
        runner = plan.make_runner(loaded, config, progress)
        runner.check()
    progress(f"attention: {loaded.backend.name}")
    progress(f"ready: {config.num_kv_blocks} KV blocks, {config.max_model_len} tokens per sequence")
    sampler = Sampler(choose_draw_operator(library))
    is_async = options.async_scheduling
    if is_async is None:
        # The host needs the tokens of a step to draft those of the next one.
        is_async = loaded.device.type == "cuda" and not config.num_speculative_tokens
    eos_token_ids = loaded.eos_token_ids or tokenizer.eos_token_ids
    return Execution(
        runner=runner,
        sampler=sampler,
        async_executor=DeviceExecutor(runner, sampler, loaded.device) if is_async else None,
        tokenizer=tokenizer,
        grammar_compiler=_grammar_compiler(tokenizer, loaded.vocab_size, eos_token_ids),
        config=config,
        eos_token_ids=eos_token_ids,
        vocab_size=loaded.vocab_size,
        fingerprint=loaded.fingerprint + _suffix(options),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        attention=loaded.backend.name,
        quantization=options.quantization,
        default_sampling=default_sampling,
    )


def _split(settings: dict[str, Any]) -> tuple[ExecutionOptions, dict[str, Any]]:
    """The options, and the limits that are set. Raises `TypeError` for another name, as a call does."""
    names = {field.name for field in fields(ExecutionOptions)}
    options = ExecutionOptions(**{name: value for name, value in settings.items() if name in names})
    types = {field.name: field.type for field in fields(EngineConfig)}
    limits = {name: value for name, value in settings.items() if name not in names}
    if unknown := limits.keys() - types.keys():
        raise TypeError(f"EngineConfig has no field {', '.join(sorted(unknown))}")
    return options, {
        name: value
        for name, value in limits.items()
        if value is not None or NoneType in get_args(types[name])
    }


def _source(model: str, options: ExecutionOptions, progress: Progress) -> str:
    """`model`, or the directory of the default model."""
    if model != DEFAULT_MODEL or Path(model).is_dir():
        return model
    if options.cache_dir is None:
        raise InvalidParameter("cache_dir", f"must be set: {DEFAULT_MODEL} is converted into it")
    return str(default_model(Path(options.cache_dir), progress))


def _native_library(
    options: ExecutionOptions, device: torch.device, progress: Progress
) -> NativeLibrary | CannotBuild:
    if device.type != "cpu":
        return CannotBuild(f"the native operators run on a CPU, not on {device.type}")
    if options.deterministic:
        return CannotBuild("deterministic mode has its own operators")
    return find_library(None if options.cache_dir is None else Path(options.cache_dir), progress)


def _choose_plan(
    options: ExecutionOptions,
    device: torch.device,
    library: NativeLibrary | CannotBuild,
    progress: Progress,
) -> ExecutionPlan:
    backends = choose_backends(
        options.attention, deterministic=options.deterministic, device=device, library=library
    )
    available = library if isinstance(library, NativeLibrary) else None
    if options.quantization != "none":
        return quantized(backends, available, options.quantization, progress)
    if options.deterministic:
        return DETERMINISTIC
    return plain(backends, available, has_graphs=options.decode_graphs)


def _load(source: str, plan: ExecutionPlan, options: ExecutionOptions, progress: Progress) -> LoadedModel:
    return load_model(
        source,
        backends=plan.backends,
        prepare=plan.prepare,
        finish=plan.finish,
        dtype=options.dtype,
        device=options.device,
        progress=progress,
    )


def _default_sampling(directory: Path, options: ExecutionOptions, progress: Progress) -> dict[str, Any]:
    if options.generation_config == "none":
        progress("generation_config.json is ignored")
        return {}
    defaults = read_defaults(directory)
    progress(describe_defaults(defaults))
    return defaults


def _grammar_compiler(
    tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
) -> GrammarCompilerPool:
    grammars = LlguidanceBackend(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    if tokenizer.knows_bytes:
        # Now rather than with the first grammar: loading briefly blocks all other threads.
        grammars.load()
    return GrammarCompilerPool(grammars)


def _suffix(options: ExecutionOptions) -> str:
    """A quantized model has another fingerprint than its files."""
    return "" if options.quantization == "none" else f"-{options.quantization}"
