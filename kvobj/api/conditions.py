"""Conditional requests: If-Match, If-None-Match, If-Modified-Since, If-Unmodified-Since, for reads, copies and writes. Pure.

Source: RFC 9110 §13 for the order of evaluation; S3 "Conditional requests" for copies (every failure is a 412) and writes.
They are evaluated after authorisation only.
"""

from __future__ import annotations

from calendar import timegm
from datetime import UTC, datetime
from email.utils import parsedate_tz
from enum import Enum
from functools import lru_cache
from time import gmtime
from typing import Final

from kvobj.api.errors import S3Error
from kvobj.catalog.rows import ObjectRow, WriteCondition

_DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS: Final = ("", "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_READ_NAMES: Final = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
_READ_NAME_SET: Final = frozenset(_READ_NAMES)
_COPY_FRONT: Final = "x-amz-copy-source-"
MAX_CONDITION_CHARACTERS: Final = 4096


class Verdict(Enum):
    """What a read's conditions lead to."""

    PROCEED = 200
    NOT_MODIFIED = 304
    FAILED = 412


def http_date(milliseconds: int) -> str:
    """An HTTP date (RFC 9110 §5.6.7); a third of the cost of email.utils, and it is paid on every read."""
    return _date_of(milliseconds // 1000)


@lru_cache(maxsize=4096)
def _date_of(seconds: int) -> str:
    t = gmtime(seconds)
    return f"{_DAYS[t.tm_wday]}, {t.tm_mday:02d} {_MONTHS[t.tm_mon]} {t.tm_year} {t.tm_hour:02d}:{t.tm_min:02d}:{t.tm_sec:02d} GMT"


def parse_http_date(value: str) -> int | None:
    """Seconds since the epoch, or None for what is no date: such a condition is ignored (RFC 9110 §13.1.3)."""
    if len(value) > 64:  # noqa: PLR2004 - no date is longer, and the parser is not linear
        return None
    try:
        parsed = parsedate_tz(value)
        return None if parsed is None else timegm(parsed[:9]) - (parsed[9] or 0)
    except (ValueError, OverflowError, IndexError, TypeError):
        return None


def etag_matches(condition: str, etag: str) -> bool:
    """Whether a list of entity tags, quoted or bare, or `*`, holds `etag` (which has no quotes)."""
    value = condition.strip()
    if value == "*":
        return True
    if "," not in value:
        return bare_etag(value) == etag
    return any(bare_etag(piece) == etag for piece in value.split(","))


def bare_etag(value: str) -> str:
    """An entity tag without white space, weakness mark and quotes."""
    value = value.strip().removeprefix("W/")
    return value[1:-1] if len(value) > 1 and value[0] == '"' == value[-1] else value


def judge_read(fields: dict[str, str], row: ObjectRow) -> Verdict:
    """What a GET's or HEAD's conditions say about the live row."""
    if _READ_NAME_SET.isdisjoint(fields):
        return Verdict.PROCEED
    match, none_match, since, unmodified = (fields.get(name) for name in _READ_NAMES)
    return _judge(match, none_match, since, unmodified, row)


def judge_copy(fields: dict[str, str], row: ObjectRow) -> bool:
    """Whether the x-amz-copy-source-if-* conditions hold for the source."""
    match, none_match, since, unmodified = (fields.get(_COPY_FRONT + name) for name in _READ_NAMES)
    return _judge(match, none_match, since, unmodified, row) is Verdict.PROCEED


def _judge(
    match: str | None, none_match: str | None, since: str | None, unmodified: str | None, row: ObjectRow
) -> Verdict:
    if match is not None:
        if not etag_matches(match, row.etag):
            return Verdict.FAILED
    elif unmodified is not None:
        limit_seconds = parse_http_date(unmodified)
        if limit_seconds is not None and row.modified_ms // 1000 > limit_seconds:
            return Verdict.FAILED
    if none_match is not None:
        if etag_matches(none_match, row.etag):
            return Verdict.NOT_MODIFIED
    elif since is not None:
        limit_seconds = parse_http_date(since)
        if limit_seconds is not None and row.modified_ms // 1000 <= limit_seconds:
            return Verdict.NOT_MODIFIED
    return Verdict.PROCEED


def range_still_holds(if_range: str | None, row: ObjectRow) -> bool:
    """If-Range (RFC 9110 §13.1.5): whether a Range header counts."""
    if if_range is None:
        return True
    if if_range.lstrip().startswith('"'):
        return bare_etag(if_range) == row.etag
    return parse_http_date(if_range) == row.modified_ms // 1000


def parse_write_condition(fields: dict[str, str]) -> WriteCondition | None:
    """The conditions of a PUT, Complete or DELETE, to be checked in the commit's own transaction; ETags lose their quotes.

    Raises `S3Error` where both stand together or one is out of bounds.
    """
    match, none_match = fields.get("if-match"), fields.get("if-none-match")
    if match is None and none_match is None:
        return None
    if match is not None and none_match is not None:
        raise S3Error("InvalidArgument", "If-Match and If-None-Match exclude each other.")
    value = match if match is not None else none_match
    assert value is not None
    if not value.strip() or "," in value or len(value) > MAX_CONDITION_CHARACTERS:
        raise S3Error("InvalidArgument", "A conditional write takes one entity tag or *.")
    return WriteCondition(
        if_match=None if match is None else bare_etag(match),
        if_none_match=None if none_match is None else bare_etag(none_match),
    )


def parse_delete_condition(fields: dict[str, str]) -> WriteCondition | None:
    """The conditions of a DELETE: If-Match, and the size and date that S3 has for directory buckets alone; ignoring them would
    delete what the client did not mean. Raises `S3Error`."""
    condition = parse_write_condition(fields)
    if condition is not None and condition.if_none_match is not None:
        raise S3Error("NotImplemented", "If-None-Match on DELETE is not implemented.", Header="If-None-Match")
    return delete_condition(
        None if condition is None else condition.if_match,
        fields.get("x-amz-if-match-size"),
        fields.get("x-amz-if-match-last-modified-time"),
    )


def delete_condition(etag: str | None, size: str | None, modified: str | None) -> WriteCondition | None:
    """What a DELETE, or an entry of DeleteObjects, names of the object; None: nothing. `modified` is an HTTP date or ISO 8601, and
    counts to the second. Raises `S3Error` InvalidArgument."""
    if etag is None and size is None and modified is None:
        return None
    size_bytes = modified_seconds = None
    if size is not None:
        size = size.strip()
        if not size.isascii() or not size.isdigit() or len(size) > 19:  # noqa: PLR2004 - digits of 2^63
            raise S3Error("InvalidArgument", "The size to match must be a number.", ArgumentName="x-amz-if-match-size")
        size_bytes = int(size)
    if modified is not None:
        modified_seconds = _seconds_of(modified.strip())
        if modified_seconds is None:
            raise S3Error(
                "InvalidArgument", "The time to match is no date.", ArgumentName="x-amz-if-match-last-modified-time"
            )
    if_match = None if etag is None else bare_etag(etag)
    return WriteCondition(if_match=if_match, size_bytes=size_bytes, modified_seconds=modified_seconds)


def _seconds_of(value: str) -> int | None:
    seconds = parse_http_date(value)
    if seconds is None and len(value) <= 40:  # noqa: PLR2004 - no ISO date is longer
        try:
            parsed = datetime.fromisoformat(value)
            seconds = int((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp())
        except (ValueError, OverflowError):
            return None
    return seconds
