"""The document of lifecycle rules: what S3 takes, what it refuses and with which words, and that it comes back as it came."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api import xml
from kvobj.api.errors import S3Error
from kvobj.api.settings.lifecycle_document import lifecycle_document, parse_lifecycle
from kvobj.api.settings.lifecycle_headers import abort_headers, expiration_headers
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, ObjectRow, UploadRow
from kvobj.catalog.setting_rows import LifecycleRule

DAYS = "<Expiration><Days>1</Days></Expiration>"
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), max_size=20
)


def document(*rules: str) -> bytes:
    inside = "".join(f"<Rule>{rule}</Rule>" for rule in rules)
    namespace = "http://s3.amazonaws.com/doc/2006-03-01/"
    return f'<LifecycleConfiguration xmlns="{namespace}">{inside}</LifecycleConfiguration>'.encode()


def rule_xml(inside: str = DAYS, *, scope: str = "<Filter/>", status: str = "Enabled", rule_id: str = "") -> str:
    name = f"<ID>{rule_id}</ID>" if rule_id else ""
    return f"{name}{scope}<Status>{status}</Status>{inside}"


def one(inside: str = DAYS, *, scope: str = "<Filter/>") -> LifecycleRule:
    (rule,) = parse_lifecycle(document(rule_xml(inside, scope=scope)))
    return rule


def told(*rules: LifecycleRule) -> bytes:
    return xml.document("LifecycleConfiguration", lifecycle_document(rules))


def refused(inside: bytes) -> tuple[str, str]:
    with pytest.raises(S3Error) as caught:
        parse_lifecycle(inside)
    return caught.value.code, caught.value.message


@pytest.mark.parametrize(
    ("scope", "fields"),
    [
        ("<Prefix>logs/</Prefix>", {"key_prefix": "logs/"}),
        ("<Prefix></Prefix>", {}),
        ("<Filter></Filter>", {}),
        ("<Filter><Prefix></Prefix></Filter>", {}),
        ("<Filter><Prefix>a&amp;b</Prefix></Filter>", {"key_prefix": "a&b"}),
        ("<Filter><Tag><Key>k</Key><Value>v</Value></Tag></Filter>", {"tags": {"k": "v"}}),
        ("<Filter><ObjectSizeGreaterThan>0</ObjectSizeGreaterThan></Filter>", {"size_over_bytes": 0}),
        ("<Filter><ObjectSizeLessThan>1</ObjectSizeLessThan></Filter>", {"size_under_bytes": 1}),
        (
            (
                "<Filter><And><Prefix>p</Prefix><Tag><Key>a</Key><Value>1</Value></Tag><Tag><Key>b</Key><Value></Value></Tag>"
                "<ObjectSizeGreaterThan>1</ObjectSizeGreaterThan><ObjectSizeLessThan>9</ObjectSizeLessThan></And></Filter>"
            ),
            {"key_prefix": "p", "tags": {"a": "1", "b": ""}, "size_over_bytes": 1, "size_under_bytes": 9},
        ),
        (
            "<Filter><And><Prefix></Prefix><ObjectSizeGreaterThan>1</ObjectSizeGreaterThan></And></Filter>",
            {"size_over_bytes": 1},
        ),
    ],
)
def test_a_rules_scope_is_told_back_as_it_came(scope: str, fields: dict[str, object]) -> None:
    rule = one(scope=scope)
    assert {name: getattr(rule, name) for name in fields} == fields
    assert scope.encode() in told(rule).replace(b"<Filter/>", b"<Filter></Filter>")
    assert parse_lifecycle(told(rule)) == (rule,)


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("<Expiration><Days>30</Days></Expiration>", {"expire_days": 30}),
        (
            "<Expiration><Date>2026-02-01T00:00:00.000Z</Date></Expiration>",
            {"expire_date_ms": 1_769_904_000_000},
        ),
        (
            "<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>",
            {"expires_delete_marker": True},
        ),
        (
            "<Expiration><ExpiredObjectDeleteMarker>false</ExpiredObjectDeleteMarker></Expiration>",
            {"expires_delete_marker": False},
        ),
        (
            "<AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation></AbortIncompleteMultipartUpload>",
            {"abort_upload_days": 7},
        ),
        (
            (
                "<NoncurrentVersionExpiration><NoncurrentDays>3</NoncurrentDays>"
                "<NewerNoncurrentVersions>5</NewerNoncurrentVersions></NoncurrentVersionExpiration>"
            ),
            {"noncurrent_days": 3, "noncurrent_kept": 5},
        ),
    ],
)
def test_every_action_is_kept_and_told_back(action: str, fields: dict[str, object]) -> None:
    rule = one(action)
    assert {name: getattr(rule, name) for name in fields} == fields
    assert action.encode() in told(rule)
    assert parse_lifecycle(told(rule)) == (rule,)


@pytest.mark.parametrize(
    "date", ["2026-02-01", "2026-02-01T00:00:00Z", "2026-02-01T00:00:00", "2026-02-01T01:30:00+01:30", " 2026-02-01 "]
)
def test_dates_are_midnight_in_iso_8601(date: str) -> None:
    assert one(f"<Expiration><Date>{date}</Date></Expiration>").expire_date_ms == 1_769_904_000_000


@pytest.mark.parametrize(
    ("date", "code"),
    [
        ("2026-02-01T00:00:01Z", "InvalidArgument"),
        ("2026-02-01T00:00:00.001Z", "InvalidArgument"),
        ("2026-02-01T00:00:00+01:00", "InvalidArgument"),
        ("20260201", "MalformedXML"),
        ("2026-02-30", "MalformedXML"),
        ("Sun, 01 Feb 2026 00:00:00 GMT", "MalformedXML"),
        ("", "MalformedXML"),
    ],
)
def test_another_date_is_refused(date: str, code: str) -> None:
    assert refused(document(rule_xml(f"<Expiration><Date>{date}</Date></Expiration>")))[0] == code


def abort_xml(days: int = 1) -> str:
    return (
        f"<AbortIncompleteMultipartUpload><DaysAfterInitiation>{days}</DaysAfterInitiation>"
        "</AbortIncompleteMultipartUpload>"
    )


def transition_xml(inside: str = "<Days>30</Days><StorageClass>GLACIER</StorageClass>") -> str:
    return f"<Transition>{inside}</Transition>"


TAG = "<Tag><Key>k</Key><Value>v</Value></Tag>"
SIZE = "<ObjectSizeGreaterThan>1</ObjectSizeGreaterThan>"
MARKER = "<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>"


@pytest.mark.parametrize(
    ("rules", "code", "words"),
    [
        ([], "MalformedXML", ""),
        ([rule_xml(status="enabled")], "MalformedXML", ""),
        (["<Filter/><Expiration><Days>1</Days></Expiration>"], "MalformedXML", ""),
        ([rule_xml(scope="")], "MalformedXML", ""),
        ([rule_xml(scope="<Prefix>a</Prefix><Filter/>")], "MalformedXML", ""),
        ([rule_xml(scope="<Filter/><Filter/>")], "MalformedXML", ""),
        ([rule_xml(scope=f"<Filter><Prefix>a</Prefix>{TAG}</Filter>")], "MalformedXML", ""),
        ([rule_xml(scope="<Filter><And><Prefix>a</Prefix></And></Filter>")], "MalformedXML", ""),
        ([rule_xml(scope=f"<Filter><And>{SIZE}{SIZE}</And></Filter>")], "MalformedXML", ""),
        ([rule_xml(scope="<Filter><Unknown>1</Unknown></Filter>")], "MalformedXML", ""),
        ([rule_xml(scope="<Filter><Tag><Value>v</Value></Tag></Filter>")], "MalformedXML", ""),
        ([rule_xml(scope="<Filter><Tag><Key></Key><Value>v</Value></Tag></Filter>")], "InvalidTag", ""),
        ([rule_xml(scope=f"<Filter><And>{TAG}{TAG}</And></Filter>")], "InvalidRequest", "Duplicate Tag Keys"),
        ([rule_xml(scope=f"<Filter><Prefix>{'p' * 1025}</Prefix></Filter>")], "InvalidRequest", "1024"),
        (
            [rule_xml(scope="<Filter><ObjectSizeLessThan>0</ObjectSizeLessThan></Filter>")],
            "InvalidRequest",
            "'ObjectSizeLessThan' should be between 1 and 1099511627776000.",
        ),
        (
            [rule_xml(scope=f"<Filter><And>{SIZE}<ObjectSizeLessThan>1</ObjectSizeLessThan></And></Filter>")],
            "InvalidRequest",
            "'ObjectSizeLessThan' has to be a value greater than 'ObjectSizeGreaterThan'.",
        ),
        ([rule_xml("")], "InvalidRequest", "At least one action needs to be specified in a rule"),
        ([rule_xml("<Expiration/>")], "MalformedXML", ""),
        ([rule_xml("<Expiration><Days>1</Days><Date>2026-01-01</Date></Expiration>")], "MalformedXML", ""),
        ([rule_xml("<Expiration><Days>one</Days></Expiration>")], "MalformedXML", ""),
        (
            [rule_xml("<Expiration><Days>0</Days></Expiration>")],
            "InvalidArgument",
            "'Days' for Expiration action must be a positive integer",
        ),
        ([rule_xml("<Expiration><Days>-1</Days></Expiration>")], "InvalidArgument", "positive integer"),
        ([rule_xml("<Expiration><Days>2147483648</Days></Expiration>")], "InvalidArgument", "positive integer"),
        ([rule_xml(abort_xml(0))], "InvalidArgument", "'DaysAfterInitiation' for AbortIncompleteMultipartUpload"),
        ([rule_xml("<AbortIncompleteMultipartUpload/>")], "MalformedXML", ""),
        ([rule_xml("<NoncurrentVersionExpiration/>")], "MalformedXML", ""),
        (
            [rule_xml("<NoncurrentVersionExpiration><NoncurrentDays>0</NoncurrentDays></NoncurrentVersionExpiration>")],
            "InvalidArgument",
            "'NoncurrentDays' for NoncurrentVersionExpiration action must be a positive integer",
        ),
        (
            [rule_xml(abort_xml(), scope=f"<Filter>{TAG}</Filter>")],
            "InvalidRequest",
            "AbortIncompleteMultipartUpload cannot be specified with Tags.",
        ),
        (
            [rule_xml(abort_xml(), scope=f"<Filter>{SIZE}</Filter>")],
            "InvalidRequest",
            "AbortIncompleteMultipartUpload cannot be specified with Object Size.",
        ),
        (
            [rule_xml(MARKER, scope=f"<Filter>{SIZE}</Filter>")],
            "InvalidRequest",
            "ExpiredObjectDeleteMarker cannot be specified with Object Size.",
        ),
        ([rule_xml(rule_id="i" * 256)], "InvalidArgument", "ID length should not exceed allowed limit of 255"),
        (
            [rule_xml(rule_id="same"), rule_xml(rule_id="same", scope="<Filter><Prefix>a</Prefix></Filter>")],
            "InvalidArgument",
            "Rule ID must be unique. Found same ID for more than one rule",
        ),
        (
            [rule_xml(scope="<Prefix>a</Prefix>"), rule_xml()],
            "InvalidRequest",
            "Filter element can only be used in Lifecycle V2.",
        ),
        (
            [rule_xml(), rule_xml(scope="<Prefix>a</Prefix>")],
            "InvalidRequest",
            "Base level prefix cannot be used in Lifecycle V2, prefixes are only supported in the Filter.",
        ),
        (
            [rule_xml(scope="<Prefix>ab</Prefix>"), rule_xml(scope="<Prefix>a</Prefix>")],
            "InvalidRequest",
            "Found overlapping prefixes 'a' and 'ab' for same action type 'Expiration'",
        ),
        (
            [rule_xml() for _ in range(1001)],
            "InvalidRequest",
            "The number of lifecycle rules must not exceed the allowed limit of 1000 rules.",
        ),
        ([rule_xml(transition_xml())], "NotImplemented", "Transition is not implemented."),
        (
            [
                rule_xml(
                    "<NoncurrentVersionTransition><NoncurrentDays>1</NoncurrentDays><StorageClass>GLACIER</StorageClass>"
                    "</NoncurrentVersionTransition>"
                )
            ],
            "NotImplemented",
            "NoncurrentVersionTransition is not implemented.",
        ),
        ([rule_xml(transition_xml("<Days>1</Days><StorageClass>COLD</StorageClass>"))], "MalformedXML", ""),
        (
            [rule_xml(transition_xml("<Date>1970-08-22T19:15:01Z</Date><StorageClass>GLACIER</StorageClass>"))],
            "InvalidArgument",
            "'Date' must be at midnight GMT",
        ),
    ],
)
def test_what_s3_refuses_is_refused_in_its_words(rules: list[str], code: str, words: str) -> None:
    found_code, message = refused(document(*rules))
    assert found_code == code
    assert words in message


@pytest.mark.parametrize("data", [b"", b"<Rule/>", b"<LifecycleConfiguration><Other/></LifecycleConfiguration>", b"<a"])
def test_another_document_is_malformed(data: bytes) -> None:
    assert refused(data)[0] == "MalformedXML"


def test_rules_without_an_id_get_one_each() -> None:
    rules = parse_lifecycle(document(rule_xml(), rule_xml("<Expiration><Days>2</Days></Expiration>")))
    assert len({rule.id for rule in rules}) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9+/]{48}", rule.id) for rule in rules)


def test_old_rules_whose_prefixes_do_not_overlap_in_an_action_stand_together() -> None:
    rules = parse_lifecycle(
        document(rule_xml(scope="<Prefix>a</Prefix>"), rule_xml(abort_xml(), scope="<Prefix>ab</Prefix>"))
    )
    assert [rule.key_prefix for rule in rules] == ["a", "ab"]


def test_a_thousand_rules_are_taken() -> None:
    rules = parse_lifecycle(document(*[rule_xml(rule_id=f"r{number}") for number in range(1000)]))
    assert [rules[0].id, rules[-1].id, len(rules)] == ["r0", "r999", 1000]


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_rules_or_refused(data: bytes) -> None:
    for inside in (data, document(data.decode("latin-1"))):
        status = 200
        try:
            parse_lifecycle(inside)
        except S3Error as error:
            status = error.status
        assert status in (200, 400, 501)


@given(
    rule_id=TEXTS.filter(bool),
    key_prefix=TEXTS,
    days=st.integers(min_value=1, max_value=2**31 - 1),
    enabled=st.booleans(),
    tags=st.dictionaries(st.text("abc", min_size=1, max_size=3), st.text("xyz ", max_size=3), min_size=2, max_size=4),
)
def test_every_rule_comes_back_equal(
    rule_id: str, key_prefix: str, days: int, tags: dict[str, str], *, enabled: bool
) -> None:
    form = "and" if key_prefix else "and-prefix"
    rule = LifecycleRule(rule_id, enabled=enabled, key_prefix=key_prefix, tags=tags, expire_days=days, form=form)
    assert parse_lifecycle(told(rule)) == (rule,)


def bucket(*rules: LifecycleRule) -> BucketRow:
    return BucketRow("bucket", BucketKind.ORDINARY, "root", 0, Durability.LOCAL, lifecycle=rules)


def object_row() -> ObjectRow:
    return ObjectRow("bucket", "key", (), 1, "etag", 1_769_904_000_123, "root", Durability.LOCAL)


@pytest.mark.parametrize(
    ("rule_id", "sent"),
    [
        ("Delete after 14 days", "Delete after 14 days"),
        ('quo"ted\\', "quo%22ted%5C"),
        ("line\r\nx-evil: 1", "line%0D%0Ax-evil: 1"),
        ("ünïcode 100%", "%C3%BCn%C3%AFcode 100%25"),
    ],
)
def test_the_headers_tell_date_and_rule_and_no_id_splits_them(rule_id: str, sent: str) -> None:
    rule = LifecycleRule(rule_id, enabled=True, expire_days=1, abort_upload_days=2)
    assert expiration_headers(bucket(rule), object_row()) == [
        ("x-amz-expiration", f'expiry-date="Tue, 03 Feb 2026 00:00:00 GMT", rule-id="{sent}"')
    ]
    upload = UploadRow("bucket", "key", "id", 1_769_904_000_123, "root", Durability.LOCAL)
    assert abort_headers(bucket(rule), upload) == [
        ("x-amz-abort-date", "Wed, 04 Feb 2026 00:00:00 GMT"),
        ("x-amz-abort-rule-id", sent),
    ]


def test_no_header_where_no_rule_applies() -> None:
    elsewhere = LifecycleRule("r", enabled=True, key_prefix="other", expire_days=1, abort_upload_days=1)
    assert expiration_headers(bucket(elsewhere), object_row()) == []
    assert abort_headers(bucket(), UploadRow("bucket", "key", "id", 0, "root", Durability.LOCAL)) == []


def test_an_end_that_lies_beyond_all_calendars_is_told_without_failing() -> None:
    rule = LifecycleRule("r", enabled=True, expire_days=2**31 - 1)
    ((_, value),) = expiration_headers(bucket(rule), object_row())
    assert value.startswith('expiry-date="')
