"""Documents of the KV API: JSON or msgpack, chosen by Content-Type and Accept, read into typed values and nothing else.

In JSON ids, keys of namespaces and digests are lower-case hex, in msgpack raw bytes; foreign keys are strings in both. A field
that nobody asked for is an error that names it. Nothing here trusts a length: `ids_of` and `tokens_of` say what a list must be.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from enum import StrEnum
from functools import cache
from typing import Any, Final, TypeVar, cast

import msgspec

from kvobj.errors import BatchTooLargeError, InvalidChunkIdError, InvalidRequestError, InvalidTokensError
from kvobj.ids.chunk_ids import CHUNK_ID_BYTES, TOKEN_BYTES, token_bytes

SHORT_ID_BYTES: Final = 16
"""Of sessions and pins."""
MAX_IDS: Final = 65_536
MAX_TOKENS: Final = 4 * 1024 * 1024
MAX_DOCUMENT_BYTES: Final = 16 * 1024 * 1024
# As many tokens as a call may have are 16 MiB in msgpack; the other fields get a little room beside them.
MAX_MSGPACK_BYTES: Final = MAX_DOCUMENT_BYTES + 256 * 1024

_SHORT_ID: Final = re.compile(r"[0-9a-f]{32}\Z").match
_CHUNK_IDS: Final = re.compile(r"[0-9a-f]*\Z").match

T = TypeVar("T")


class Format(StrEnum):
    """How a document is written; the values are media types."""

    JSON = "application/json"
    MSGPACK = "application/msgpack"


_FORMATS: Final = {
    "application/json": Format.JSON,
    "application/msgpack": Format.MSGPACK,
    "application/x-msgpack": Format.MSGPACK,
    "application/vnd.msgpack": Format.MSGPACK,
}


def request_format(fields: Mapping[str, str]) -> Format:
    """The format of a request's document: of Content-Type, JSON where there is none. `InvalidRequestError` for any other type."""
    value = fields.get("content-type", "").partition(";")[0].strip().lower()
    if not value:
        return Format.JSON
    known = _FORMATS.get(value)
    if known is None:
        raise InvalidRequestError(
            f"a document is {Format.JSON} or {Format.MSGPACK}, and not what its Content-Type says"
        )
    return known


def reply_format(fields: Mapping[str, str]) -> Format:
    """The format of the reply: the first of the two that Accept names, else the request's. Never fails: errors are told in it."""
    for accepted in fields.get("accept", "").split(","):
        known = _FORMATS.get(accepted.partition(";")[0].strip().lower())
        if known is not None:
            return known
    return _FORMATS.get(fields.get("content-type", "").partition(";")[0].strip().lower(), Format.JSON)


@cache
def _decoder(kind: Hashable, document_format: Format) -> Any:  # noqa: ANN401 - of any type that msgspec can read
    target: Any = kind
    return msgspec.json.Decoder(target) if document_format is Format.JSON else msgspec.msgpack.Decoder(target)


def decode(document: bytes | bytearray, kind: type[T], document_format: Format) -> T:
    """The document as a value of the type. `InvalidRequestError` says which field is wrong and how; a wrong list of ids or of
    tokens is `InvalidChunkIdError` or `InvalidTokensError`."""
    try:
        value: T = _decoder(cast("Hashable", kind), document_format).decode(document)
    except msgspec.ValidationError as error:
        text = str(error)
        # The place is msgspec's own notation, `$.tokens[3]`.
        if "`$.tokens" in text:
            raise InvalidTokensError(f"token ids: {text}") from error
        if "`$.ids" in text or "`$.tails" in text:
            raise InvalidChunkIdError(f"chunk ids: {text}") from error
        raise InvalidRequestError(text) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is no {document_format} document") from error
    return value


def encode(value: object, document_format: Format) -> bytes:
    """A reply's value as a document: bytes in it are hex in JSON."""
    if document_format is Format.MSGPACK:
        return msgspec.msgpack.encode(value)
    return msgspec.json.encode(_with_hex(value))


def _with_hex(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _with_hex(each) for name, each in value.items()}
    if isinstance(value, msgspec.Struct):
        return _with_hex(msgspec.structs.asdict(value))
    if isinstance(value, list | tuple):
        return [_with_hex(each) for each in value]
    return value


def ids_of(ids: bytes | Sequence[str]) -> bytes:
    """Chunk ids of either format, end to end. `BatchTooLargeError`, `InvalidChunkIdError`."""
    if isinstance(ids, bytes):
        if len(ids) % CHUNK_ID_BYTES:
            raise InvalidChunkIdError("chunk ids have 32 bytes each")
        check_count(len(ids) // CHUNK_ID_BYTES)
        return ids
    check_count(len(ids))
    text = "".join(ids)
    # An id has one spelling, and fromhex by itself skips spaces and takes capitals.
    if any(len(each) != 2 * CHUNK_ID_BYTES for each in ids) or not _CHUNK_IDS(text):
        raise InvalidChunkIdError("chunk ids have 64 lower-case hex digits each")
    return bytes.fromhex(text)


def tokens_of(tokens: bytes | Sequence[int]) -> bytes:
    """Token ids of either format as little-endian u32, end to end. `BatchTooLargeError`, `InvalidTokensError`."""
    count = len(tokens) // TOKEN_BYTES if isinstance(tokens, bytes) else len(tokens)
    if count > MAX_TOKENS:
        raise BatchTooLargeError(f"a call has at most {MAX_TOKENS} token ids", limit=MAX_TOKENS, given=count)
    return token_bytes(tokens)


def check_count(count: int) -> None:
    """Raise `BatchTooLargeError` for more chunks than a call may name."""
    if count > MAX_IDS:
        raise BatchTooLargeError(f"a call names at most {MAX_IDS} chunks", limit=MAX_IDS, given=count)


def short_id(value: str | bytes) -> bytes | None:
    """A session's or a pin's id of either format: 16 bytes, or None for what cannot be one."""
    if isinstance(value, str):
        if not _SHORT_ID(value):
            return None
        return bytes.fromhex(value)
    return value if len(value) == SHORT_ID_BYTES else None
