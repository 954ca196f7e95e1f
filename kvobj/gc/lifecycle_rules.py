"""What a bucket's lifecycle rules say of one object or upload, and when. Pure.

Days count from the last change and end at the next midnight UTC, as in S3. Where a day is set to be something else (for tests)
nothing is rounded. Source: S3 User Guide, "Lifecycle configuration elements", "Expiring objects".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvobj.catalog.rows import ObjectRow, UploadRow
from kvobj.catalog.setting_rows import LifecycleRule

DAY_MS: Final = 24 * 3600 * 1000


def fits(rule: LifecycleRule, row: ObjectRow) -> bool:
    """Whether an enabled rule applies to the object: everything that it names has to fit."""
    return (
        rule.enabled
        and row.key.startswith(rule.key_prefix)
        and (rule.size_over_bytes is None or row.size_bytes > rule.size_over_bytes)
        and (rule.size_under_bytes is None or row.size_bytes < rule.size_under_bytes)
        and (not rule.tags or rule.tags.items() <= row.tags.items())
    )


def expires_ms(rule: LifecycleRule, row: ObjectRow, *, day_ms: int = DAY_MS) -> int | None:
    """When the rule ends the object (wall time); None where it does not apply to it."""
    if not fits(rule, row):
        return None
    if rule.expire_date_ms is not None:
        return rule.expire_date_ms
    return None if rule.expire_days is None else _after(row.modified_ms, rule.expire_days, day_ms)


def upload_ends_ms(rule: LifecycleRule, upload: UploadRow, *, day_ms: int = DAY_MS) -> int | None:
    """When the rule ends the upload, should it still be in progress; None where it does not apply to it."""
    if rule.abort_upload_days is None or not rule.enabled or not upload.key.startswith(rule.key_prefix):
        return None
    return _after(upload.initiated_ms, rule.abort_upload_days, day_ms)


def due(rule: LifecycleRule, row: ObjectRow, *, now_ms: int, day_ms: int = DAY_MS) -> bool:
    """Whether the object is to go now. Never one whose last change lies ahead: then the clock was put back, and tells no age."""
    if row.modified_ms > now_ms:
        return False
    at_ms = expires_ms(rule, row, day_ms=day_ms)
    return at_ms is not None and at_ms <= now_ms


def upload_due(rule: LifecycleRule, upload: UploadRow, *, now_ms: int, day_ms: int = DAY_MS) -> bool:
    """Whether the upload is to be ended now; likewise."""
    if upload.initiated_ms > now_ms:
        return False
    at_ms = upload_ends_ms(rule, upload, day_ms=day_ms)
    return at_ms is not None and at_ms <= now_ms


def first_expiration(rules: Iterable[LifecycleRule], row: ObjectRow) -> tuple[int, LifecycleRule] | None:
    """The earliest end that any rule sets the object in real days, and the first rule that sets it."""
    first: tuple[int, LifecycleRule] | None = None
    for rule in rules:
        if not row.key.startswith(rule.key_prefix):  # asked at each read: of a thousand rules most end here
            continue
        at_ms = expires_ms(rule, row)
        if at_ms is not None and (first is None or at_ms < first[0]):
            first = at_ms, rule
    return first


def first_upload_end(rules: Iterable[LifecycleRule], upload: UploadRow) -> tuple[int, LifecycleRule] | None:
    """The same of an upload."""
    first: tuple[int, LifecycleRule] | None = None
    for rule in rules:
        at_ms = upload_ends_ms(rule, upload)
        if at_ms is not None and (first is None or at_ms < first[0]):
            first = at_ms, rule
    return first


def key_prefixes(rules: Iterable[LifecycleRule]) -> tuple[str, ...]:
    """The fewest key prefixes below which everything lies that the rules may apply to, in order; none lies below another."""
    found: list[str] = []
    for key_prefix in sorted({rule.key_prefix for rule in rules}):
        if not found or not key_prefix.startswith(found[-1]):
            found.append(key_prefix)
    return tuple(found)


def _after(start_ms: int, days: int, day_ms: int) -> int:
    end_ms = start_ms + days * day_ms
    return end_ms if day_ms != DAY_MS else end_ms // DAY_MS * DAY_MS + DAY_MS
