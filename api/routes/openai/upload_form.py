"""Reads the form of an upload. The file goes to the storage as it is read, never as a whole into memory."""

from dataclasses import dataclass
from typing import IO, Any, cast

from flask import Request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.formparser import FormDataParser

from api.file_storage import FileStorage, NewFile
from api.problems import Problem, bad_field, excerpt
from api.schemas.openai.files import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS

PURPOSES = frozenset({"batch"})
OTHER_PURPOSES = frozenset({"assistants", "evals", "fine-tune", "user_data", "vision"})
"""Purposes of OpenAI's API that nothing of this service uses."""
MEMORY_BYTES = 512 * 1024
"""Limit of the parser's own buffer, and of the fields that are not files."""
MAX_PARTS = 16
FORM_BYTES = 64 * 1024
"""What a form may have beside its file."""
MAX_NAME_CHARACTERS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A form that was read. `file`: its content, not committed yet. `seconds`: until it expires, if given."""

    file: NewFile
    filename: str
    purpose: str
    seconds: int | None


def read_upload(request: Request, storage: FileStorage, name: str, max_bytes: int) -> Upload:
    """Write the file of the form to `storage` as `name`, uncommitted. Raises `Problem` and `OSError`."""
    if request.mimetype != "multipart/form-data":
        raise Problem(415, "unsupported_media_type", "send the file as `Content-Type: multipart/form-data`")
    receiver = _Receiver(storage, name, max_bytes)
    try:
        form, filename = _parse(request, receiver, max_bytes)
        if receiver.file is None or filename is None:
            raise bad_field("file", "is required: the file to upload", "missing_field")
        return Upload(
            file=receiver.file,
            filename=excerpt(filename)[:MAX_NAME_CHARACTERS] or "file",
            purpose=_purpose(form),
            seconds=_expiry(form),
        )
    except BaseException:
        receiver.discard()
        raise


class _Receiver:
    """Gives the parser a file of the storage for the one file of the form."""

    def __init__(self, storage: FileStorage, name: str, max_bytes: int) -> None:
        self.file: NewFile | None = None
        self._storage = storage
        self._name = name
        self._max_bytes = max_bytes

    def __call__(self, *_: Any, **__: Any) -> IO[bytes]:
        if self.file is not None:
            raise bad_field("file", "only one file may be sent")
        self.file = self._storage.create(self._name)
        return cast("IO[bytes]", self.file)

    def discard(self) -> None:
        if self.file is not None:
            self.file.discard()


def _parse(request: Request, receiver: _Receiver, max_bytes: int) -> tuple[dict[str, str], str | None]:
    """The fields of the form and the name of its file."""
    parser = FormDataParser(
        stream_factory=receiver,
        max_form_memory_size=MEMORY_BYTES,
        max_form_parts=MAX_PARTS,
        silent=False,
    )
    request.max_content_length = max_bytes + FORM_BYTES
    try:
        _, form, files = parser.parse(
            request.stream, request.mimetype, request.content_length, request.mimetype_params
        )
    except RequestEntityTooLarge:
        detail = f"the form may have at most {MAX_PARTS} parts and a file of at most {max_bytes} bytes"
        raise Problem(413, "body_too_large", detail, param="body") from None
    except ValueError as error:
        raise Problem(400, "invalid_form", f"the form is not valid: {error}", param="body") from None
    file = files.get("file")
    if receiver.file is not None and receiver.file.size > max_bytes:
        raise Problem(413, "file_too_large", f"the file may have at most {max_bytes} bytes", param="file")
    return form.to_dict(), file.filename if file else None


def _purpose(form: dict[str, str]) -> str:
    purpose = form.get("purpose")
    if purpose is None:
        raise bad_field("purpose", "is required, such as `batch`", "missing_field")
    if purpose in OTHER_PURPOSES:
        raise bad_field("purpose", f"{purpose} is not supported; this service has only `batch`")
    if purpose not in PURPOSES:
        raise bad_field("purpose", "must be `batch`")
    return purpose


def _expiry(form: dict[str, str]) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise bad_field("expires_after.anchor", "must be `created_at`")
    is_number = seconds is not None and seconds.isascii() and seconds.isdecimal() and len(seconds) < 10
    if not is_number or not MIN_EXPIRY_SECONDS <= int(seconds or 0) <= MAX_EXPIRY_SECONDS:
        limits = f"from {MIN_EXPIRY_SECONDS} to {MAX_EXPIRY_SECONDS}"
        raise bad_field("expires_after.seconds", f"must be a whole number {limits}")
    return int(seconds or 0)
