"""From an error's status and body (JSON of the admin and KV calls, XML of S3) back to the typed error of that branch."""

from __future__ import annotations

import json
import re
from typing import Final

from kvobj.errors import (
    AccessDeniedError,
    BucketExistsError,
    BusyError,
    CapacityError,
    ConflictError,
    CorruptionError,
    InvalidRequestError,
    KvobjError,
    NoSuchBucketError,
    NoSuchKeyError,
    NotFoundError,
    PreconditionFailedError,
    StoreFullError,
    UnavailableError,
)

_BY_CODE: Final[dict[str, type[KvobjError]]] = {
    "NoSuchBucket": NoSuchBucketError,
    "NoSuchKey": NoSuchKeyError,
    "BucketAlreadyExists": BucketExistsError,
    "BucketAlreadyOwnedByYou": BucketExistsError,
    "PreconditionFailed": PreconditionFailedError,
    "StoreFull": StoreFullError,
    "SlowDown": BusyError,
    "QuotaExceeded": CapacityError,
}
_BY_STATUS: Final[dict[int, type[KvobjError]]] = {
    401: AccessDeniedError,
    403: AccessDeniedError,
    404: NotFoundError,
    409: ConflictError,
    412: PreconditionFailedError,
    500: CorruptionError,
    503: UnavailableError,
    507: StoreFullError,
}
_XML_ELEMENT: Final = r"<{0}>([^<]*)</{0}>"
_MESSAGE_LENGTH_MAX: Final = 500


def answer_error(status: int, body: bytes) -> KvobjError:
    """The error that an answer stands for, by its code first and its status second."""
    code, message = _code_and_message(body)
    fallback = InvalidRequestError if status < 500 else UnavailableError  # noqa: PLR2004 - where server errors begin
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, fallback)
    return kind(message or "the server refused", code=code or "none", status=status)


def _code_and_message(body: bytes) -> tuple[str, str]:
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        return str(error["code"]), str(error["message"])[:_MESSAGE_LENGTH_MAX]
    except (ValueError, KeyError, TypeError):
        code = re.search(_XML_ELEMENT.format("Code"), text)
        message = re.search(_XML_ELEMENT.format("Message"), text)
        return (code[1] if code else ""), (message[1][:_MESSAGE_LENGTH_MAX] if message else "")
