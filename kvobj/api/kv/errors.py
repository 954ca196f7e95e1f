"""How the KV API tells of errors: S3's status and code, in a document of the reply's format instead of XML (docs/kv-api.md).

The codes and their messages are those of `api/errors.py`, the one place that knows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvobj.api.errors import RETRY_AFTER_SECONDS, describe
from kvobj.api.kv.bodies import encode, reply_format
from kvobj.api.message import Reply
from kvobj.errors import KvobjError

# What of an error's data a client may know; the rest is for logs.
_DETAILS: Final = (
    "ActualPartCount",
    "ArgumentName",
    "Feature",
    "bucket",
    "differs",
    "expected_bytes",
    "field",
    "given",
    "hint",
    "key",
    "limit",
    "limit_bytes",
    "namespace",
    "parent",
    "position",
    "size_bytes",
)
_BUSY: Final = 503


def error_value(error: KvobjError) -> tuple[int, dict[str, object]]:
    """An error's status, and code, message and detail as a reply's document has them."""
    code, status, message = describe(error)
    detail = {name: _plain(error.data[name]) for name in _DETAILS if name in error.data}
    return status, {"code": code, "message": message, "detail": detail}


def kv_error_reply(
    error: KvobjError, *, fields: Mapping[str, str], request_id: str, host_id: str, resource: str, close: bool
) -> Reply:
    """The reply to a call that failed."""
    status, value = error_value(error)
    document_format = reply_format(fields)
    headers = [("x-amz-request-id", request_id), ("x-amz-id-2", host_id), ("content-type", document_format.value)]
    if status == _BUSY:
        headers.append(("retry-after", str(RETRY_AFTER_SECONDS)))
    if "Allow" in error.data:
        headers.append(("allow", str(error.data["Allow"])))
    body = encode({"error": {**value, "resource": resource, "request_id": request_id}}, document_format)
    return Reply(status, tuple(headers), body, close=close, log={"error": value["code"]})


def _plain(value: object) -> object:
    if isinstance(value, list | tuple | set | frozenset):
        return [str(each) for each in value]
    return value if isinstance(value, str | int) else str(value)
