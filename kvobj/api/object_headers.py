"""Headers that belong to an object: taken from a PUT into its row, and told again on GET and HEAD.

Only the names listed here and x-amz-meta-* are ever taken from a client: nothing it sends can pose as internal metadata.
Values with line ends are refused on the way in, so that none splits a reply on the way out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from kvobj.api.checksums import checksum_headers
from kvobj.api.chunk_headers import chunk_headers
from kvobj.api.conditions import http_date
from kvobj.api.errors import S3Error
from kvobj.api.header_text import Header, from_wire, is_latin_1, is_plain, to_wire
from kvobj.api.settings.lifecycle_headers import expiration_headers
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, ObjectRow

MAX_METADATA_BYTES: Final = 2048
MAX_HEADER_CHARACTERS: Final = 8192
DEFAULT_CONTENT_TYPE: Final = "binary/octet-stream"
STORED_HEADERS: Final = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
)
_META: Final = "x-amz-meta-"
_OVERRIDES: Final = tuple((f"response-{name}", name) for name in STORED_HEADERS)
_META_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+\Z").match


def parse_stored_headers(fields: Mapping[str, str]) -> dict[str, str]:
    """The standard headers to store. `aws-chunked` is framing and no coding of the object: it goes, others stay."""
    stored = {name: _checked(fields[name]) for name in STORED_HEADERS if name in fields}
    encoding = stored.get("content-encoding")
    if encoding is not None and "aws-chunked" in encoding.lower():
        kept = [coding.strip() for coding in encoding.split(",") if coding.strip().lower() not in ("aws-chunked", "")]
        if kept:
            stored["content-encoding"] = ",".join(kept)
        else:
            del stored["content-encoding"]
    return {name: value for name, value in stored.items() if value}


def parse_metadata(fields: Mapping[str, str]) -> dict[str, str]:
    """User metadata by lower-case name without its front. Raises `S3Error` MetadataTooLarge above 2 KiB in all."""
    metadata: dict[str, str] = {}
    size_bytes = 0
    for name, value in fields.items():
        if name.startswith(_META):
            short = name[len(_META) :]
            if not _META_NAME(short):
                raise S3Error("InvalidArgument", "A metadata name is not a token.", ArgumentName="x-amz-meta-")
            text = _checked(from_wire(value))
            size_bytes += len(short) + len(text.encode())
            metadata[short] = text
    if size_bytes > MAX_METADATA_BYTES:
        raise S3Error("MetadataTooLarge", Size=size_bytes, MaxSizeAllowed=MAX_METADATA_BYTES)
    return metadata


def parse_durability(fields: Mapping[str, str]) -> Durability | None:
    """x-kvobj-durability, or None where the bucket's default counts."""
    value = fields.get("x-kvobj-durability")
    if value is None:
        return None
    try:
        return Durability(value.strip().lower())
    except ValueError as error:
        raise S3Error(
            "InvalidArgument", "x-kvobj-durability is memory, local or shared.", ArgumentName="x-kvobj-durability"
        ) from error


def check_no_overrides(query: Mapping[str, str]) -> None:
    """Raise `S3Error` InvalidRequest where the query names headers of the reply: only who signs may."""
    if any(name in query for name, _ in _OVERRIDES):
        raise S3Error("InvalidRequest", "Request specific response headers cannot be used for anonymous GET requests.")


def entity_headers(row: ObjectRow) -> list[Header]:
    """Validators alone: what a 304 tells."""
    return [("etag", f'"{row.etag}"'), ("last-modified", http_date(row.modified_ms))]


def object_headers(
    row: ObjectRow, bucket: BucketRow, *, overrides: Mapping[str, str], with_checksums: bool
) -> list[Header]:
    """All headers that tell of an object but its length and range. `overrides` is a signed request's query."""
    headers = entity_headers(row)
    headers.append(("accept-ranges", "bytes"))
    stored = row.headers
    if overrides and any(name in overrides for name, _ in _OVERRIDES):
        stored = dict(stored)
        for name, header in _OVERRIDES:
            if name in overrides:
                stored[header] = _override(name, overrides[name])
    if "content-type" not in stored:
        headers.append(("content-type", DEFAULT_CONTENT_TYPE))
    headers += stored.items()
    for name, value in row.metadata.items():
        headers.append((_META + name, to_wire(value)))
    if bucket.lifecycle:
        headers += expiration_headers(bucket, row)
    if with_checksums and row.checksums:
        headers += checksum_headers(row.checksums)
    if bucket.kind is BucketKind.KV:
        headers.append(("x-kvobj-durability", row.durability.value))
        if row.digest is not None:
            headers.append(("x-kvobj-digest", row.digest.hex()))
        headers += chunk_headers(row)
    return headers


def write_headers(row: ObjectRow, bucket: BucketRow, *, existed: bool, durability: Durability) -> list[Header]:
    """What a KV bucket tells of a write, beside the ETag; nothing for an ordinary bucket's writes but the durability."""
    headers: list[Header] = [("x-kvobj-durability", durability.value)]
    if bucket.lifecycle:
        headers += expiration_headers(bucket, row)
    if bucket.kind is BucketKind.KV:
        headers.append(("x-kvobj-existed", "true" if existed else "false"))
        if row.digest is not None:
            headers.append(("x-kvobj-digest", row.digest.hex()))
    return headers


def _override(name: str, value: str) -> str:
    """A header of the reply as the query states it, byte for byte: RFC 2047 is no coding that browsers read file names by."""
    if not is_latin_1(_checked(value)):
        raise S3Error(
            "InvalidArgument",
            "Header value cannot be represented using ISO-8859-1.",
            ArgumentName=name,
            ArgumentValue=value,
        )
    return value


def _checked(value: str) -> str:
    if len(value) > MAX_HEADER_CHARACTERS or not is_plain(value):
        raise S3Error("InvalidArgument", "A header value is too long or has control characters.")
    return value
