"""Finds the weight files that transformers reads, and checks that they are complete and unquantized."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.config_file import quantized
from engine.checkpoint.reading import listed, read_json, unusable
from engine.checkpoint.safetensors_header import Tensor, read_header
from engine.checkpoint.torch_archive import check_archive
from engine.errors import InvalidParameter

_CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which transformers searches for them."""
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class Weights:
    """Contents of the weight files. `tensors`: by name, empty for `torch.save`. `num_bytes`: of all files."""

    tensors: dict[str, Tensor]
    num_bytes: int

    def loaded_bytes(self, item_bytes: int) -> int:
        """Memory of the loaded tensors, with `item_bytes` per float."""
        if not self.tensors:
            return self.num_bytes
        return sum(
            tensor.num_bytes * item_bytes // _item_bytes(tensor)
            if tensor.dtype in _FLOATS
            else tensor.num_bytes
            for tensor in self.tensors.values()
        )


def _item_bytes(tensor: Tensor) -> int:
    return {"F64": 8, "F32": 4}.get(tensor.dtype, 2)


def check_weights(directory: Path, config: dict[str, Any]) -> Weights:
    """Check every weight file of a model directory.

    Raises `InvalidParameter` with the file and the reason, or `UnsupportedModel` for tensors in a quantized
    type.
    """
    path = _main_file(directory, config)
    files = _shards(path) if path.name.endswith(".index.json") else [path]
    if ".safetensors" not in path.name:
        for file in files:
            check_archive(file)
        return Weights({}, sum(file.stat().st_size for file in files))
    tensors = _merged(path, {file: read_header(file) for file in files})
    _refuse_quantized_types(directory, config, tensors)
    return Weights(tensors, sum(tensor.num_bytes for tensor in tensors.values()))


def _main_file(directory: Path, config: dict[str, Any]) -> Path:
    """The file that transformers reads first. A broken link counts, so that the error names it."""
    named = config.get("transformers_weights")
    names = (named,) if isinstance(named, str) else _CANDIDATES
    for name in names:
        path = directory / name
        if path.is_symlink() or path.exists():
            return path
    raise InvalidParameter(
        "model", f"{directory} holds no weights (looked for {', '.join(names)}){_hint(directory)}"
    )


def _hint(directory: Path) -> str:
    """Other files in the directory that may be the weights."""
    found = sorted(
        path.name
        for suffix in ("*.safetensors", "*.bin", "*.gguf", "*.pth")
        for path in directory.glob(suffix)
    )
    return f"; it holds {listed(found)}" if found else ""


def _shards(index: Path) -> list[Path]:
    """The files that an index names."""
    names = sorted(set(_weight_map(index).values()))
    if missing := [name for name in names if not _is_present(index.parent / name)]:
        raise unusable(
            index, f"names {len(names)} files, of which {len(missing)} are missing: {listed(missing)}"
        )
    return [index.parent / name for name in names]


def _is_present(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _weight_map(index: Path) -> dict[str, str]:
    file_names = read_json(index, unique_keys=True).get("weight_map")
    if (
        not isinstance(file_names, dict)
        or not file_names
        or not all(isinstance(name, str) for name in file_names.values())
    ):
        raise unusable(index, "has no weight_map of tensor names to file names")
    return file_names


def _merged(path: Path, headers: dict[Path, dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all shards. Raises `InvalidParameter` if they differ from the index."""
    tensors: dict[str, Tensor] = {}
    holders: dict[str, str] = {}
    for file, header in headers.items():
        if twice := sorted(header.keys() & tensors.keys()):
            raise unusable(path, f"{holders[twice[0]]} and {file.name} both hold {listed(twice)}")
        tensors |= header
        holders |= dict.fromkeys(header, file.name)
    if path.name.endswith(".index.json"):
        misplaced = sorted(name for name, file in _weight_map(path).items() if holders.get(name) != file)
        if misplaced:
            raise unusable(path, f"names tensors that are not in the file it names: {listed(misplaced)}")
    return tensors


def _refuse_quantized_types(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse quantized tensors that config.json does not declare. Integer buffers are allowed."""
    for name, tensor in tensors.items():
        is_small = tensor.dtype.startswith(("F8", "F6", "F4"))
        is_integer_weight = name.endswith(".weight") and tensor.dtype not in _FLOATS
        if is_small or is_integer_weight:
            raise quantized(
                f"model type {config['model_type']!r}", directory, f"{name} is stored as {tensor.dtype}"
            )
