"""What a lifecycle rule says of an object and when: days that end at midnight, dates, filters, clocks that were put back."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.catalog.rows import Durability, ObjectRow, UploadRow
from kvobj.catalog.setting_rows import LifecycleRule
from kvobj.gc.lifecycle_rules import (
    DAY_MS,
    due,
    expires_ms,
    first_expiration,
    first_upload_end,
    fits,
    key_prefixes,
    upload_due,
    upload_ends_ms,
)

KEYS = st.text(alphabet="ab/", max_size=6)
TIMES = st.integers(min_value=0, max_value=4_000_000_000_000)


def at(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


def row(
    key: str = "key", *, modified_ms: int = 0, size_bytes: int = 5, tags: dict[str, str] | None = None
) -> ObjectRow:
    return ObjectRow("bucket", key, (), size_bytes, "etag", modified_ms, "root", Durability.LOCAL, tags=tags or {})


def upload(key: str = "key", *, initiated_ms: int = 0) -> UploadRow:
    return UploadRow("bucket", key, "id", initiated_ms, "root", Durability.LOCAL)


def rule(rule_id: str = "r", /, **fields: object) -> LifecycleRule:
    return msgspec.structs.replace(LifecycleRule(rule_id, enabled=True), **fields)


@pytest.mark.parametrize(
    ("modified", "days", "expected"),
    [
        ("2026-01-15T10:30:00", 3, "2026-01-19T00:00:00"),  # the example of S3's guide
        ("2026-01-15T00:00:00", 1, "2026-01-17T00:00:00"),
        ("2026-01-15T23:59:59.999", 1, "2026-01-17T00:00:00"),
        ("2026-02-28T12:00:00", 1, "2026-03-02T00:00:00"),
    ],
)
def test_days_end_at_the_next_midnight(modified: str, days: int, expected: str) -> None:
    assert expires_ms(rule(expire_days=days), row(modified_ms=at(modified))) == at(expected)
    assert upload_ends_ms(rule(abort_upload_days=days), upload(initiated_ms=at(modified))) == at(expected)


def test_a_day_of_another_length_is_not_rounded() -> None:
    assert expires_ms(rule(expire_days=3), row(modified_ms=1234), day_ms=10_000) == 31_234
    assert upload_ends_ms(rule(abort_upload_days=2), upload(initiated_ms=7), day_ms=10) == 27


def test_a_date_is_that_day_for_what_was_written_before_and_after_it() -> None:
    dated = rule(expire_date_ms=at("2026-01-15T00:00:00"))
    now_ms = at("2026-01-20T00:00:00")
    for modified in ("2020-01-01T00:00:00", "2026-01-19T00:00:00"):
        assert due(dated, row(modified_ms=at(modified)), now_ms=now_ms)
    assert not due(dated, row(modified_ms=0), now_ms=at("2026-01-14T23:59:59"))


@pytest.mark.parametrize(
    ("fields", "fitting"),
    [
        ({"key_prefix": "k"}, True),
        ({"key_prefix": "key/"}, False),
        ({"size_over_bytes": 4}, True),
        ({"size_over_bytes": 5}, False),
        ({"size_under_bytes": 6}, True),
        ({"size_under_bytes": 5}, False),
        ({"tags": {"a": "1"}}, True),
        ({"tags": {"a": "1", "b": "2"}}, True),
        ({"tags": {"a": "2"}}, False),
        ({"tags": {"a": "1", "c": "3"}}, False),
        ({"key_prefix": "k", "size_over_bytes": 4, "tags": {"b": "2"}}, True),
        ({"key_prefix": "x", "size_over_bytes": 4, "tags": {"b": "2"}}, False),
        ({"enabled": False}, False),
    ],
)
def test_everything_that_a_rule_names_has_to_fit(fields: dict[str, object], *, fitting: bool) -> None:
    found = rule(expire_days=1, **fields)
    assert fits(found, row(tags={"a": "1", "b": "2"})) is fitting
    assert (expires_ms(found, row(tags={"a": "1", "b": "2"})) is not None) is fitting


def test_a_rule_without_an_expiration_ends_no_object() -> None:
    for fields in ({"abort_upload_days": 1}, {"noncurrent_days": 1}, {"expires_delete_marker": True}):
        assert not due(rule(**fields), row(), now_ms=10**15)
    assert upload_ends_ms(rule(expire_days=1), upload()) is None
    assert upload_ends_ms(rule(abort_upload_days=1, enabled=False), upload()) is None
    assert upload_ends_ms(rule(abort_upload_days=1, key_prefix="x"), upload()) is None


@given(
    modified_ms=TIMES,
    now_ms=TIMES,
    days=st.integers(min_value=1, max_value=5000),
    day_ms=st.sampled_from([1, 500, DAY_MS]),
)
def test_nothing_goes_before_its_days_are_over_and_all_does_a_day_after(
    modified_ms: int, now_ms: int, days: int, day_ms: int
) -> None:
    is_due = due(rule(expire_days=days), row(modified_ms=modified_ms), now_ms=now_ms, day_ms=day_ms)
    assert is_due is upload_due(
        rule(abort_upload_days=days), upload(initiated_ms=modified_ms), now_ms=now_ms, day_ms=day_ms
    )
    age_ms = now_ms - modified_ms
    if age_ms < days * day_ms:
        assert not is_due
    if age_ms >= (days + 1) * day_ms:
        assert is_due


@given(modified_ms=TIMES, back_ms=st.integers(min_value=1, max_value=10**12))
def test_on_a_clock_that_was_put_back_nothing_expires(modified_ms: int, back_ms: int) -> None:
    dated = rule(expire_date_ms=0)
    assert due(dated, row(modified_ms=modified_ms), now_ms=modified_ms)
    assert not due(dated, row(modified_ms=modified_ms), now_ms=modified_ms - back_ms)
    assert not upload_due(rule(abort_upload_days=1), upload(initiated_ms=modified_ms), now_ms=modified_ms - back_ms)


def test_the_earliest_of_several_rules_is_told_and_the_first_of_equals() -> None:
    rules = [
        rule("late", expire_days=9),
        rule("a", expire_days=2),
        rule("b", expire_days=2),
        rule("no", abort_upload_days=1),
    ]
    assert first_expiration(rules, row()) == (3 * DAY_MS, rules[1])
    assert first_upload_end(rules, upload()) == (2 * DAY_MS, rules[3])
    assert first_expiration(rules[3:], row()) is None
    assert first_upload_end(rules[:3], upload()) is None


@given(prefixes=st.lists(KEYS, max_size=8), key=KEYS)
def test_the_key_prefixes_to_look_at_cover_every_rule_once(prefixes: list[str], key: str) -> None:
    found = key_prefixes([rule(str(number), key_prefix=prefix) for number, prefix in enumerate(prefixes)])
    covering = [prefix for prefix in found if key.startswith(prefix)]
    assert len(covering) == int(any(key.startswith(prefix) for prefix in prefixes))
    assert set(found) <= set(prefixes)
    assert list(found) == sorted(found)
