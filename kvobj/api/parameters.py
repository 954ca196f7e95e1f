"""Values of query parameters, checked: integers, names, numbers of parts. Each raises `S3Error` InvalidArgument."""

from __future__ import annotations

from typing import Final

from kvobj.api.errors import S3Error
from kvobj.catalog.rows import MAX_KEY_BYTES, MAX_PARTS

MAX_PAGE: Final = 1000
_MAX_INTEGER: Final = 2**31 - 1


def limit_of(query: dict[str, str], name: str) -> int:
    """How many a page may hold: what was asked, cut to `MAX_PAGE`."""
    return min(integer_of(query, name, default=MAX_PAGE), MAX_PAGE)


def name_of(query: dict[str, str], name: str) -> str:
    """A key, or a part of one, that a listing is asked about: no longer than a key and without NUL."""
    value = query.get(name, "")
    if len(value.encode()) > MAX_KEY_BYTES or "\0" in value:
        raise S3Error("InvalidArgument", f"Argument {name} is no key.", ArgumentName=name)
    return value


def integer_of(query: dict[str, str], name: str, *, default: int) -> int:
    """An integer of at most 31 bits, of a query or of headers; `default` where it is absent or empty."""
    value = query.get(name)
    if value is None or value == "":
        return default
    if not value.isascii() or not value.isdigit() or len(value) > 10 or int(value) > _MAX_INTEGER:  # noqa: PLR2004 - digits of 2^31
        raise S3Error(
            "InvalidArgument", f"Argument {name} must be an integer between 0 and {_MAX_INTEGER}.", ArgumentName=name
        )
    return int(value)


def part_number_of(query: dict[str, str]) -> int:
    """The number of a multipart upload's part, from 1."""
    number = integer_of(query, "partNumber", default=0)
    if not 1 <= number <= MAX_PARTS:
        raise S3Error(
            "InvalidArgument",
            f"Part number must be an integer between 1 and {MAX_PARTS}, inclusive.",
            ArgumentName="partNumber",
        )
    return number
