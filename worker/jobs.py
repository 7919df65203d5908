"""Reads the request from an RQ job without RQ.

Invariant: a function named by a job is never imported or called, only compared with the known one.
"""

import json
import zlib

from tokenmill.protocol.messages import JOB_FUNCTION, GenerateRequest, ProtocolError
from worker.errors import RequestRefused, invalid_request


def read_job(data: bytes) -> GenerateRequest:
    """The request in the `data` of an RQ job: zlib of JSON `[function, null, [payload], {}]`.

    Raises `RequestRefused` for anything else.
    """
    function, payload = _read_call(data)
    if function != JOB_FUNCTION:
        raise RequestRefused(
            invalid_request(
                "unknown_function",
                f"this queue accepts only jobs of {JOB_FUNCTION}, not {function!r}; nothing was called",
            )
        )
    try:
        return GenerateRequest.from_payload(payload)
    except ProtocolError as error:
        raise RequestRefused(invalid_request("unreadable_request", str(error))) from error


def _read_call(data: bytes) -> tuple[object, object]:
    try:
        # RQ also accepts data that is not compressed.
        plain = zlib.decompress(data) if data[:1] == b"\x78" else data
        function, _, args, _ = json.loads(plain)
        return function, args[0] if isinstance(args, list) and len(args) == 1 else None
    except (ValueError, TypeError, zlib.error) as error:
        raise RequestRefused(
            invalid_request(
                "unreadable_request", "the job's data is not a JSON call; see rq.serializers.JSONSerializer"
            )
        ) from error
