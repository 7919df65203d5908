"""Checks a weights file of `torch.save` (`pytorch_model.bin`) without unpickling it."""

import zipfile
from pathlib import Path

from engine.checkpoint.reading import open_checked, unreadable, unusable

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80\x02"


def check_archive(path: Path) -> None:
    """Raise `InvalidParameter` unless it is a complete zip archive, or a pickle of torch before 1.6."""
    with open_checked(path) as file:
        try:
            head = file.read(4)
            if head.startswith(_PICKLE):
                return
            if head != _ZIP:
                raise unusable(path, "is not a weights file of PyTorch: neither a zip archive nor a pickle")
            file.seek(0)
            names = zipfile.ZipFile(file).namelist()
        except OSError as error:
            raise unreadable(path, error) from error
        except zipfile.BadZipFile as error:
            size = path.stat().st_size
            raise unusable(path, f"is truncated or damaged ({size} bytes): {error}") from error
    if not any(name.endswith("data.pkl") for name in names):
        raise unusable(path, "is a zip archive, but not of PyTorch: it holds no data.pkl")
