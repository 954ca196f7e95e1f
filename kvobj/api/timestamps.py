"""The times of S3's XML: ISO 8601 with milliseconds, UTC."""

from __future__ import annotations

from functools import lru_cache
from time import gmtime, strftime


def iso_time(milliseconds: int) -> str:
    """`2026-01-31T12:00:00.000Z`."""
    seconds, rest = divmod(milliseconds, 1000)
    return f"{_to_the_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=1024)
def _to_the_second(seconds: int) -> str:
    # Objects of a listing were often written together.
    return strftime("%Y-%m-%dT%H:%M:%S", gmtime(seconds))
