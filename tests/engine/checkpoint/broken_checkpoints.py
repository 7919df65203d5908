"""Breaks a valid model directory in one way each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Fault = Callable[[Path], object]

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 269060552\n"


def text(name: str, content: str) -> Fault:
    """Replaces a file by `content`."""
    return lambda directory: (directory / name).write_text(content)


def removed(*patterns: str) -> Fault:
    """Removes the files that match one of `patterns`."""

    def remove(directory: Path) -> None:
        for pattern in patterns:
            for path in directory.glob(pattern):
                path.unlink()

    return remove


def config(**changes: Any) -> Fault:
    """Changes values in config.json; None removes one."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        values = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))

    return change


def tensors(change: Callable[[Tensors], Tensors]) -> Fault:
    """Changes the tensors in model.safetensors."""

    def rewrite(directory: Path) -> None:
        path = directory / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return rewrite


def cut(name: str, num_bytes: int) -> Fault:
    """Truncates a file."""

    def truncate(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return truncate


def lengthened(name: str) -> Fault:
    """Appends bytes to a file."""

    def lengthen(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes() + b"more")

    return lengthen


def sharded(directory: Path) -> None:
    """Splits the weights into two files with an index, which is valid."""
    path = directory / "model.safetensors"
    found = load_file(path)
    path.unlink()
    names = sorted(found)
    shards = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, held in shards.items():
        save_file({name: found[name] for name in held}, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, held in shards.items() for name in held}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def pickled(directory: Path) -> None:
    """Stores the weights with torch.save, which is valid."""
    path = directory / "model.safetensors"
    torch.save(load_file(path), directory / "pytorch_model.bin")
    path.unlink()


def both(first: Fault, second: Fault) -> Fault:
    def change(directory: Path) -> None:
        first(directory)
        second(directory)

    return change
