"""What a chunk has of its own beside its bytes and its place: standard headers and x-amz-meta-*, from a reply and for a PUT. Pure.

Text that is not ASCII travels as RFC 2047 has it, which is how a client of either store is told of it, and stays so where it was
fetched to. Bounds are those of a PUT (docs/s3.md): what does not hold them comes from no kvobj, and is passed over.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Final

from kvobj.catalog.rows import ObjectRow

METADATA_BYTES_MAX: Final = 2 * 2048
"""Twice what a PUT may bring: encoding makes it longer."""
_VALUE_CHARACTERS_MAX: Final = 8192
_META: Final = "x-amz-meta-"
_META_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9a-z]+\Z").match
_NAMES: Final = (
    "content-type",
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "expires",
)
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]").search
_DEFAULT_TYPE: Final = "binary/octet-stream"
"""What a reply says of an object whose writer said nothing."""


def object_fields(row: ObjectRow) -> dict[str, str]:
    """The fields of a PUT of the same chunk."""
    fields = {name: _ascii(value) for name, value in row.headers.items() if name in _NAMES}
    return fields | {_META + name: _ascii(value) for name, value in row.metadata.items()}


def parse_object_fields(fields: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Standard headers and metadata as a row has them, from a reply's fields. What no PUT can have stored is passed over."""
    headers = {name: fields[name] for name in _NAMES if name in fields and _is_value(fields[name])}
    if headers.get("content-type") == _DEFAULT_TYPE:
        del headers["content-type"]
    metadata = {
        name[len(_META) :]: value
        for name, value in fields.items()
        if name.startswith(_META) and _META_NAME(name[len(_META) :]) and _is_value(value)
    }
    size_bytes = sum(len(name) + len(value) for name, value in metadata.items())
    return headers, metadata if size_bytes <= METADATA_BYTES_MAX else {}


def _is_value(value: str) -> bool:
    return 0 < len(value) <= _VALUE_CHARACTERS_MAX and value.isascii() and not _CONTROL(value)


def _ascii(value: str) -> str:
    return value if value.isascii() else f"=?UTF-8?B?{base64.b64encode(value.encode()).decode()}?="
