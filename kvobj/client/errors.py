"""From an error's status and body (JSON or msgpack of admin and KV calls, XML of S3) back to the typed error of that branch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvobj.errors import (
    AccessDeniedError,
    BatchTooLargeError,
    BucketExistsError,
    BusyError,
    ConflictError,
    CorruptionError,
    ImmutableChunkError,
    InvalidChunkIdError,
    InvalidRequestError,
    InvalidTokensError,
    KvobjError,
    LayoutMismatchError,
    NamespaceConflictError,
    NoSuchBucketError,
    NoSuchKeyError,
    NoSuchNamespaceError,
    NoSuchSessionError,
    NoSuchUploadError,
    NotFoundError,
    ParentNotFoundError,
    PinLimitExceededError,
    PreconditionFailedError,
    QuotaExceededError,
    SessionExpiredError,
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
    "QuotaExceeded": QuotaExceededError,
    "BatchTooLarge": BatchTooLargeError,
    "ImmutableChunk": ImmutableChunkError,
    "InvalidChunkId": InvalidChunkIdError,
    "InvalidTokens": InvalidTokensError,
    "LayoutMismatch": LayoutMismatchError,
    "NamespaceConflict": NamespaceConflictError,
    "NoSuchNamespace": NoSuchNamespaceError,
    "NoSuchSession": NoSuchSessionError,
    "NoSuchUpload": NoSuchUploadError,
    "ParentNotFound": ParentNotFoundError,
    "PinLimitExceeded": PinLimitExceededError,
    "SessionExpired": SessionExpiredError,
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
_XML_ELEMENTS: Final = re.compile(r"<(\w+)>([^<]*)</\1>")
_XML_ENTITY: Final = re.compile(r"&(?:(amp|lt|gt|quot|apos)|#([0-9]{1,7})|#x([0-9A-Fa-f]{1,6}));", re.ASCII)
_XML_NAMED: Final = {"amp": "&", "lt": "<", "gt": ">", "quot": '"', "apos": "'"}
_XML_CHARACTER: Final = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_UNICODE_MAX: Final = 0x10FFFF
_SECONDS: Final = re.compile(r"[0-9]{1,6}")
_MESSAGE_LENGTH_MAX: Final = 500
_MSGPACK: Final = "application/msgpack"


def answer_error(status: int, body: bytes, *, content_type: str = "", retry_after: str = "") -> KvobjError:
    """The error that an answer stands for, by its code first and its status second. What its detail tells is the error's data, and
    as `retry_after_seconds` what a Retry-After header of seconds does."""
    code, message, detail = _told(body, content_type)
    if _SECONDS.fullmatch(retry_after):
        detail = {**detail, "retry_after_seconds": int(retry_after)}
    return error_of(status, code, message, detail)


def error_of(status: int, code: str, message: str, detail: Mapping[Any, object]) -> KvobjError:
    """The error of this code. Details without a name are left out."""
    fallback = InvalidRequestError if status < 500 else UnavailableError  # noqa: PLR2004 - where server errors begin
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, fallback)
    data = {name: value for name, value in detail.items() if isinstance(name, str) and name not in ("message", "self")}
    return kind(
        message[:_MESSAGE_LENGTH_MAX] or "the server refused", **data | {"code": code or "none", "status": status}
    )


def _told(body: bytes, content_type: str) -> tuple[str, str, Mapping[str, object]]:
    try:
        document = msgspec.msgpack.decode(body) if content_type == _MSGPACK else msgspec.json.decode(body)
        error = document["error"]
        detail = error.get("detail")
        return str(error["code"]), str(error["message"]), detail if isinstance(detail, dict) else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        found = _XML_ELEMENTS.findall(body.decode("utf-8", "replace"))
        elements = {name: _XML_ENTITY.sub(_character, text) for name, text in found}
        told: dict[str, object] = {}
        if "Hint" in elements:
            told["hint"] = elements["Hint"]
        if "Parent" in elements:
            told["parent"] = elements["Parent"]
        if "Differs" in elements:
            told["differs"] = elements["Differs"].split(",")
        return elements.get("Code", ""), elements.get("Message", ""), told


def _character(entity: re.Match[str]) -> str:
    """What an entity stands for. One that stands for no character of XML's, such as a terminal's escape, stays as it is written."""
    name, decimal, hexadecimal = entity.groups()
    if name is not None:
        return _XML_NAMED[name]
    number = int(decimal) if decimal is not None else int(hexadecimal, 16)
    character = chr(number) if number <= _UNICODE_MAX else ""
    return character if _XML_CHARACTER.fullmatch(character) else entity[0]
