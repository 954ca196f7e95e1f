from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api.conditions import (
    Verdict,
    bare_etag,
    etag_matches,
    http_date,
    judge_copy,
    judge_read,
    parse_http_date,
    parse_write_condition,
    range_still_holds,
)
from kvobj.api.errors import S3Error
from kvobj.catalog.rows import Durability, ObjectRow, WriteCondition

MODIFIED_MS = 1_700_000_000_500
BEFORE, SAME, AFTER = (http_date(MODIFIED_MS + offset) for offset in (-2000, 0, 2000))
ROW = ObjectRow("bucket", "key", (), 1, "abc", MODIFIED_MS, "me", Durability.LOCAL)


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({}, Verdict.PROCEED),
        ({"if-match": '"abc"'}, Verdict.PROCEED),
        ({"if-match": "abc"}, Verdict.PROCEED),
        ({"if-match": "*"}, Verdict.PROCEED),
        ({"if-match": '"x", "abc"'}, Verdict.PROCEED),
        ({"if-match": '"x"'}, Verdict.FAILED),
        ({"if-none-match": '"abc"'}, Verdict.NOT_MODIFIED),
        ({"if-none-match": 'W/"abc"'}, Verdict.NOT_MODIFIED),
        ({"if-none-match": '"x"'}, Verdict.PROCEED),
        ({"if-modified-since": BEFORE}, Verdict.PROCEED),
        ({"if-modified-since": SAME}, Verdict.NOT_MODIFIED),
        ({"if-modified-since": AFTER}, Verdict.NOT_MODIFIED),
        ({"if-unmodified-since": BEFORE}, Verdict.FAILED),
        ({"if-unmodified-since": SAME}, Verdict.PROCEED),
        ({"if-match": '"abc"', "if-unmodified-since": BEFORE}, Verdict.PROCEED),
        ({"if-none-match": '"x"', "if-modified-since": AFTER}, Verdict.PROCEED),
        ({"if-modified-since": "yesterday"}, Verdict.PROCEED),
        ({"if-match": '"abc"', "if-none-match": '"abc"'}, Verdict.NOT_MODIFIED),
    ],
)
def test_a_read_is_judged_in_the_order_of_the_rfc(fields: dict[str, str], verdict: Verdict) -> None:
    assert judge_read(fields, ROW) is verdict


def test_every_failed_condition_on_a_copy_source_is_a_refusal() -> None:
    assert judge_copy({"x-amz-copy-source-if-match": "abc"}, ROW)
    assert not judge_copy({"x-amz-copy-source-if-none-match": "abc"}, ROW)
    assert not judge_copy({"x-amz-copy-source-if-modified-since": AFTER}, ROW)
    assert judge_copy({"if-none-match": "abc"}, ROW)


def test_if_range_counts_only_with_the_present_validator() -> None:
    assert range_still_holds(None, ROW)
    assert range_still_holds('"abc"', ROW)
    assert range_still_holds(SAME, ROW)
    assert not range_still_holds('"x"', ROW)
    assert not range_still_holds(BEFORE, ROW)


def test_write_conditions_lose_their_quotes() -> None:
    assert parse_write_condition({}) is None
    assert parse_write_condition({"if-match": '"abc"'}) == WriteCondition(if_match="abc")
    assert parse_write_condition({"if-none-match": "*"}) == WriteCondition(if_none_match="*")


@pytest.mark.parametrize("fields", [{"if-match": "a", "if-none-match": "*"}, {"if-match": ""}, {"if-match": '"a","b"'}])
def test_an_ambiguous_write_condition_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(S3Error):
        parse_write_condition(fields)


@given(st.integers(0, 4_000_000_000))
def test_dates_are_written_as_the_library_writes_them_and_read_back(seconds: int) -> None:
    assert http_date(seconds * 1000 + 999) == formatdate(seconds, usegmt=True)
    assert parse_http_date(http_date(seconds * 1000)) == seconds


@given(st.text(max_size=80))
def test_any_text_is_a_date_or_none_and_a_tag_or_not(value: str) -> None:
    assert parse_http_date(value) is None or isinstance(parse_http_date(value), int)
    etag_matches(value, "abc")
    bare_etag(value)
