"""Reads the header of a safetensors file and compares it with the file's size.

The format: 8 bytes of header length, little endian; a JSON object of tensor name to dtype, shape and the
first and last byte of its data; the data, without gaps. See https://github.com/huggingface/safetensors.
"""

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from engine.checkpoint.reading import open_checked, parse_object, unreadable, unusable
from engine.errors import InvalidParameter

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class Tensor(NamedTuple):
    """One tensor as a header describes it. `num_bytes` in the file."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name. Raises `InvalidParameter` if the header does not match the size."""
    with open_checked(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            start = _LENGTH_BYTES + length
            if size < _LENGTH_BYTES or start > size or length > _MAX_HEADER_BYTES:
                raise unusable(
                    path,
                    f"is truncated or not a safetensors file: its header has {length} bytes, the file {size}",
                )
            text = file.read(length)
        except OSError as error:
            raise unreadable(path, error) from error
    header = _parse(path, text)
    _check_size(path, header, start, size)
    return {name: tensor for name, (tensor, _, _) in header.items()}


def _parse(path: Path, text: bytes) -> dict[str, tuple[Tensor, int, int]]:
    """Tensor, begin and end in the data, by name."""
    try:
        entries = parse_object(text, unique_keys=True)
    except ValueError as error:
        raise unusable(path, f"is damaged: its header {error}") from error
    entries.pop("__metadata__", None)
    return {name: _entry(path, name, entry) for name, entry in entries.items()}


def _entry(path: Path, name: str, entry: Any) -> tuple[Tensor, int, int]:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:  # `int` of infinity overflows.
        raise _damaged(path, name) from error
    bits = _BITS.get(dtype)
    if bits is None:
        raise unusable(path, f"tensor {name} has the unknown dtype {dtype}")
    # In bits: some dtypes are smaller than a byte.
    if min((*shape, begin, end - begin)) < 0 or math.prod(shape) * bits != 8 * (end - begin):
        raise _damaged(path, name)
    return Tensor(dtype, shape, end - begin), begin, end


def _damaged(path: Path, name: str) -> InvalidParameter:
    return unusable(path, f"is damaged: its header does not describe the tensor {name}")


def _check_size(path: Path, header: dict[str, tuple[Tensor, int, int]], start: int, size: int) -> None:
    end_of_last = 0
    for name, (_, begin, end) in sorted(header.items(), key=lambda item: item[1][1:]):
        if begin != end_of_last:
            raise unusable(
                path, f"is damaged: the data of tensor {name} begins at {begin}, not {end_of_last}"
            )
        end_of_last = end
    if start + end_of_last != size:
        kind = "truncated" if size < start + end_of_last else "damaged"
        raise unusable(
            path, f"is {kind}: its header describes {start + end_of_last} bytes, the file has {size}"
        )
