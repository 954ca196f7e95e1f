"""The Range header: one byte range of an object of known size. Pure.

Source: RFC 9110 §14 and S3 GetObject: several ranges, and what is no range, are answered with the whole object.
"""

from __future__ import annotations

import re
from typing import Final

from kvobj.errors import InvalidRangeError

_RANGE: Final = re.compile(r"bytes *= *(\d{0,99}) *- *(\d{0,99})\Z", re.ASCII | re.IGNORECASE).match


def parse_range(value: str, size_bytes: int) -> tuple[int, int] | None:
    """The half-open `(start, stop)` that a Range header asks for, or None where the whole object is the answer.

    Raises `InvalidRangeError` (416) with `size_bytes` where the range starts past the end, also of an empty object.
    """
    found = _RANGE(value.strip())
    if found is None:
        return None
    first, last = found[1], found[2]
    if not first:
        if not last:
            return None
        suffix_bytes = int(last)
        if suffix_bytes == 0 or size_bytes == 0:
            raise InvalidRangeError("the range is past the end", range=value, size_bytes=size_bytes)
        return max(0, size_bytes - suffix_bytes), size_bytes
    start = int(first)
    if last and int(last) < start:
        return None
    if start >= size_bytes:
        raise InvalidRangeError("the range is past the end", range=value, size_bytes=size_bytes)
    return start, min(int(last) + 1, size_bytes) if last else size_bytes


def parse_copy_range(value: str, size_bytes: int) -> tuple[int, int]:
    """The half-open range of x-amz-copy-source-range, which must be `bytes=first-last` and lie inside the source.

    Raises `InvalidRangeError` past the end and ValueError for another form.
    """
    found = _RANGE(value)
    if found is None or not found[1] or not found[2] or int(found[2]) < int(found[1]):
        raise ValueError("not of the form bytes=first-last")
    start, stop = int(found[1]), int(found[2]) + 1
    if stop > size_bytes:
        raise InvalidRangeError("the range is past the end", range=value, size_bytes=size_bytes)
    return start, stop
