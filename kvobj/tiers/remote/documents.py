"""The XML documents of S3 that are asked for and answered here, and the values in them. Pure.

Source: Amazon S3 API Reference (ListObjectsV2, ListMultipartUploads, DeleteObjects, CreateMultipartUpload,
CompleteMultipartUpload). What a server answers is not trusted: no DOCTYPE, no entities, and what is not the document asked for
raises `BrokenAnswerError`.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import unquote_plus
from xml.sax.saxutils import escape

from kvobj.wire.response_head import BrokenAnswerError

_XMLNS: Final = "http://s3.amazonaws.com/doc/2006-03-01/"


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object as HEAD and LIST show it. `etag` is quoted, as conditions want it; `modified_ms` is the server's wall time."""

    key: str
    size_bytes: int
    etag: str
    modified_ms: int


@dataclass(frozen=True, slots=True)
class RemoteUpload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    initiated_ms: int


@dataclass(frozen=True, slots=True)
class RemotePart:
    """An uploaded part. `checksum`: its name in Complete and its value, where the upload has one."""

    number: int
    etag: str
    checksum: tuple[str, str] | None


@dataclass(frozen=True, slots=True)
class ObjectPage:
    """One page of a listing, its keys ascending."""

    objects: tuple[RemoteObject, ...]
    is_truncated: bool


@dataclass(frozen=True, slots=True)
class UploadPage:
    """One page of unfinished uploads, and from where the next one goes on."""

    uploads: tuple[RemoteUpload, ...]
    is_truncated: bool
    next_key: str
    next_upload_id: str


def parse_objects(body: bytes) -> ObjectPage:
    """A page of ListObjectsV2."""
    root = _document(body, "ListBucketResult")
    is_encoded = _text(root, "EncodingType") == "url"
    return ObjectPage(
        tuple(
            RemoteObject(
                _key(each, is_encoded=is_encoded),
                _whole_number(_text(each, "Size")),
                quoted(_text(each, "ETag")),
                _iso_ms(_text(each, "LastModified")),
            )
            for each in root.iterfind("Contents")
        ),
        _text(root, "IsTruncated") == "true",
    )


def parse_uploads(body: bytes) -> UploadPage:
    """A page of ListMultipartUploads."""
    root = _document(body, "ListMultipartUploadsResult")
    is_encoded = _text(root, "EncodingType") == "url"
    next_key = _text(root, "NextKeyMarker")
    return UploadPage(
        tuple(
            RemoteUpload(_key(each, is_encoded=is_encoded), _text(each, "UploadId"), _iso_ms(_text(each, "Initiated")))
            for each in root.iterfind("Upload")
        ),
        _text(root, "IsTruncated") == "true",
        unquote_plus(next_key) if is_encoded else next_key,
        _text(root, "NextUploadIdMarker"),
    )


def parse_upload_id(body: bytes) -> str:
    """The id that CreateMultipartUpload answered."""
    upload_id = _text(_document(body, "InitiateMultipartUploadResult"), "UploadId")
    if not upload_id:
        raise BrokenAnswerError("an upload without an id")
    return upload_id


def parse_completed(body: bytes) -> str:
    """The ETag that CompleteMultipartUpload answered; empty where the server told none."""
    return quoted(_text(_document(body, "CompleteMultipartUploadResult"), "ETag"))


def parse_not_deleted(body: bytes) -> list[tuple[str, str]]:
    """(key, code) of what DeleteObjects did not delete, although it was there."""
    root = _document(body, "DeleteResult")
    errors = [(_text(each, "Key"), _text(each, "Code")) for each in root.iterfind("Error")]
    return [(key, code) for key, code in errors if code != "NoSuchKey"]


def delete_document(keys: Sequence[str]) -> bytes:
    """The body of DeleteObjects."""
    names = "".join([f"<Object><Key>{escape(key)}</Key></Object>" for key in keys])
    return f'<Delete xmlns="{_XMLNS}"><Quiet>true</Quiet>{names}</Delete>'.encode()


def complete_document(parts: Sequence[RemotePart]) -> bytes:
    """The body of CompleteMultipartUpload; `parts` ascending."""
    lines = []
    for part in parts:
        checksum = "" if part.checksum is None else f"<{part.checksum[0]}>{part.checksum[1]}</{part.checksum[0]}>"
        lines.append(f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag>{checksum}</Part>")
    return f'<CompleteMultipartUpload xmlns="{_XMLNS}">{"".join(lines)}</CompleteMultipartUpload>'.encode()


def quoted(etag: str) -> str:
    """An ETag with its quotes; empty where there is none."""
    bare = etag.strip().removeprefix("W/").strip('"')
    return f'"{bare}"' if bare else ""


def http_date_ms(written: str) -> int | None:
    """Wall time of an HTTP date; None where it is none."""
    try:
        return int(parsedate_to_datetime(written).timestamp() * 1000)
    except (ValueError, TypeError, OverflowError):
        return None


def _document(body: bytes, name: str) -> ET.Element:
    if b"<!" in body or b"\0" in body:  # in UTF-16, where a declaration would not be seen, every second byte is 0
        raise BrokenAnswerError("a document with declarations, or in no encoding of S3's")
    try:
        root = ET.fromstring(body)  # noqa: S314 - no declarations, and so no entities
    except (ET.ParseError, ValueError) as error:
        raise BrokenAnswerError(f"no {name}: {error}") from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    if root.tag != name:
        raise BrokenAnswerError(f"a {root.tag[:50]} in place of a {name}")
    return root


def _text(element: ET.Element, name: str) -> str:
    return element.findtext(name) or ""


def _key(element: ET.Element, *, is_encoded: bool) -> str:
    key = _text(element, "Key")
    if not key:
        raise BrokenAnswerError("an entry without a key")
    return unquote_plus(key) if is_encoded else key


def _whole_number(written: str) -> int:
    if not (written.isascii() and written.isdigit() and len(written) <= 18):  # noqa: PLR2004 - digits of 2**60
        raise BrokenAnswerError("an entry without a size")
    return int(written)


def _iso_ms(written: str) -> int:
    """0 where it is no time: nothing rests on it."""
    try:
        return int(datetime.fromisoformat(written).timestamp() * 1000)
    except (ValueError, OverflowError):
        return 0
