"""Conditions of policies: operators, keys, and what an absent key means."""

import time
from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any

import pytest
from fakes import ManualClock
from policy_requests import BOB, NOBODY, ROOT, Request, ask, statement

from kvobj.api.access.actions import Action
from kvobj.api.access.policy import Effect
from kvobj.api.access.source_address import came_by_tls, source_address
from kvobj.api.errors import S3Error
from kvobj.catalog.rows import Durability, ObjectRow, UserRow

EVERYTHING = {"Action": "s3:*", "Resource": ["arn:aws:s3:::data", "arn:aws:s3:::data/*"]}


def holds(
    condition: object,
    action: Action = Action.GET_OBJECT,
    *,
    row: ObjectRow | None = None,
    tags: Mapping[str, str] | None = None,
    **request: Any,  # noqa: ANN401 - whatever a request has
) -> bool:
    """Whether a statement with this condition speaks."""
    policy = [statement(**EVERYTHING, Condition=condition)]
    return ask(policy, action, row=row, tags=tags, request=Request(**request)) is Effect.ALLOW


def agent(operator: str, *values: object, sent: str | None = "curl/8") -> bool:
    """Whether the operator holds for the User-Agent that was sent."""
    return holds({operator: {"aws:UserAgent": list(values)}}, fields={} if sent is None else {"user-agent": sent})


@pytest.mark.parametrize(
    ("operator", "values", "holds_for_sent", "holds_for_none"),
    [
        ("StringEquals", ["x", "curl/8"], True, False),
        ("StringEquals", ["curl/*"], False, False),
        ("StringNotEquals", ["x", "curl/8"], False, True),
        ("StringNotEquals", ["x", "y"], True, True),
        ("StringEqualsIgnoreCase", ["CURL/8"], True, False),
        ("StringNotEqualsIgnoreCase", ["CURL/8"], False, True),
        ("StringLike", ["c?rl/*"], True, False),
        ("StringNotLike", ["c?rl/*"], False, True),
        ("StringEqualsIfExists", ["x"], False, True),
        ("StringLikeIfExists", ["curl*"], True, True),
        ("StringNotEqualsIfExists", ["curl/8"], False, True),
        ("ForAnyValue:StringEquals", ["curl/8"], True, False),
        ("ForAnyValue:StringNotEquals", ["curl/8"], False, False),
        ("ForAllValues:StringEquals", ["x"], False, True),
        ("ForAllValues:StringLike", ["curl*"], True, True),
        ("Null", ["true"], False, True),
        ("Null", [False], True, False),
    ],
)
def test_operators_on_text(operator: str, values: list[object], holds_for_sent: bool, holds_for_none: bool) -> None:  # noqa: FBT001 - a case
    assert agent(operator, *values) is holds_for_sent
    assert agent(operator, *values, sent=None) is holds_for_none


@pytest.mark.parametrize(
    ("operator", "value", "fitting"),
    [
        ("NumericEquals", 10, {"10"}),
        ("NumericNotEquals", "10", {"9", "11", "many"}),
        ("NumericLessThan", 10, {"9"}),
        ("NumericLessThanEquals", "10.0", {"9", "10"}),
        ("NumericGreaterThan", 10, {"11"}),
        ("NumericGreaterThanEquals", 10, {"10", "11"}),
    ],
)
def test_operators_on_numbers(operator: str, value: object, fitting: set[str]) -> None:
    condition = {operator: {"s3:max-keys": value}}
    asked = ("9", "10", "11", "many")
    assert {each for each in asked if holds(condition, Action.LIST_BUCKET, overrides={"max-keys": each})} == fitting


@pytest.mark.parametrize(
    ("operator", "value", "expected"),
    [
        ("DateLessThan", "2001-09-09T01:46:41Z", True),
        ("DateLessThan", "2001-09-09T01:46:40Z", False),
        ("DateLessThanEquals", "2001-09-09T01:46:40Z", True),
        ("DateGreaterThan", "2001-09-09T03:46:39+02:00", True),
        ("DateGreaterThan", "2001-09-09", True),
        ("DateEquals", 1_000_000_000, True),
        ("DateNotEquals", "1000000000", False),
        ("DateGreaterThanEquals", "2001-09-09T01:46:41", False),
    ],
)
@pytest.mark.parametrize("key", ["aws:CurrentTime", "aws:EpochTime"])
def test_operators_on_dates(operator: str, value: object, expected: bool, key: str) -> None:  # noqa: FBT001 - a case
    assert holds({operator: {key: value}}, clock=ManualClock(now_ms=1_000_000_000_999)) is expected


def test_addresses_are_in_networks() -> None:
    def from_(address: str, operator: str, *networks: str) -> bool:
        return holds({operator: {"aws:SourceIp": list(networks)}}, source_address=address)

    assert from_("10.1.2.3", "IpAddress", "192.0.2.0/24", "10.0.0.0/8")
    assert from_("::ffff:10.1.2.3", "IpAddress", "10.0.0.0/8")
    assert not from_("10.1.2.3", "NotIpAddress", "10.0.0.0/8")
    assert from_("2001:db8::1", "NotIpAddress", "10.0.0.0/8")
    assert from_("2001:db8::1", "IpAddress", "2001:db8::/32")
    assert from_("10.0.0.1", "IpAddress", "10.0.0.1")
    assert not from_("", "IpAddress", "0.0.0.0/0")
    assert from_("", "NotIpAddress", "10.0.0.0/8")


def test_keys_of_who_asks() -> None:
    def user_is(user: UserRow, **keys: str) -> bool:
        return holds({"StringEquals": {f"aws:{name}": value for name, value in keys.items()}}, user=user)

    assert user_is(BOB, username="bob", userid="bob", PrincipalType="User")
    assert user_is(ROOT, PrincipalType="Account")
    assert user_is(NOBODY, userid="anonymous", PrincipalType="Anonymous")
    assert not user_is(NOBODY, username="")
    assert holds({"ArnEquals": {"aws:PrincipalArn": "arn:aws:iam:::user/bob"}})
    assert holds({"ArnLike": {"aws:PrincipalArn": "arn:aws:iam::*:user/b*"}})
    assert not holds({"ArnLike": {"aws:PrincipalArn": "arn:*:user/bob:x:y:z"}})
    assert holds({"ArnNotEquals": {"aws:PrincipalArn": "arn:aws:iam:::user/alice"}})
    assert not holds({"ArnEquals": {"aws:PrincipalArn": "arn:aws:iam:::user/*"}}, user=NOBODY)


def test_keys_of_how_it_is_asked() -> None:
    assert holds({"Bool": {"aws:SecureTransport": False}})
    assert holds(
        {"Bool": {"aws:SecureTransport": "true"}, "NumericGreaterThanEquals": {"s3:TlsVersion": 1.2}}, is_secure=True
    )
    assert not holds({"NumericGreaterThanEquals": {"s3:TlsVersion": 1.2}})
    assert holds({"StringEquals": {"s3:authType": "REST-HEADER", "s3:signatureversion": "AWS4-HMAC-SHA256"}})
    assert holds({"StringEquals": {"s3:authType": "REST-QUERY-STRING"}}, is_presigned=True)
    assert holds({"Null": {"s3:authType": True, "s3:signatureAge": True}}, user=NOBODY)
    assert holds({"StringLike": {"aws:Referer": "https://*"}}, fields={"referer": "https://x.example"})
    assert holds({"StringEquals": {"s3:x-amz-content-sha256": "UNSIGNED-PAYLOAD"}}, is_presigned=True)
    clock = ManualClock(now_ms=1_000_000_060_000)
    stamp = "20010909T014640Z"
    assert holds({"NumericLessThanEquals": {"s3:signatureAge": 60_000}}, stamp=stamp, clock=clock)
    assert not holds({"NumericLessThan": {"s3:signatureAge": 60_000}}, stamp=stamp, clock=clock)
    assert holds({"Null": {"s3:signatureAge": True}}, stamp="20010931T014640Z")


def test_keys_that_the_query_has_are_about_listings_only() -> None:
    condition = {"StringEquals": {"s3:prefix": "home/", "s3:delimiter": "/"}}
    query = {"prefix": "home/", "delimiter": "/"}
    assert holds(condition, Action.LIST_BUCKET, overrides=query)
    assert not holds(condition, Action.LIST_BUCKET, overrides={"prefix": "home/"})
    assert not holds(condition, Action.GET_OBJECT, overrides=query)


def test_keys_that_headers_have_are_about_writes_only() -> None:
    headers = {"x-amz-acl": "private", "x-amz-storage-class": "STANDARD", "if-none-match": "*"}
    condition = {"StringEquals": {"s3:x-amz-acl": "private"}}
    assert holds(condition, Action.PUT_OBJECT, fields=headers)
    assert not holds(condition, Action.GET_OBJECT, fields=headers)
    assert holds({"StringEquals": {"s3:x-amz-storage-class": "STANDARD"}}, Action.PUT_OBJECT, fields=headers)
    assert holds({"Null": {"s3:if-none-match": False, "s3:if-match": True}}, Action.PUT_OBJECT, fields=headers)
    assert holds(
        {"StringLike": {"s3:x-amz-grant-read": "id=b*"}}, Action.PUT_OBJECT, fields={"x-amz-grant-read": "id=bob"}
    )
    assert holds({"Bool": {"s3:ObjectCreationOperation": True}}, Action.PUT_OBJECT)
    assert not holds({"Bool": {"s3:ObjectCreationOperation": True}}, Action.PUT_OBJECT, overrides={"partNumber": "1"})


def test_what_an_upload_said_when_it_began_is_not_asked_of_its_parts() -> None:
    condition = {"StringEquals": {"s3:x-amz-acl": "bucket-owner-full-control"}}
    part, end, begin = {"uploadId": "u", "partNumber": "1"}, {"uploadId": "u"}, {"uploads": "", "uploadId": "u"}
    assert holds(condition, Action.PUT_OBJECT, overrides=part)
    assert holds(condition, Action.PUT_OBJECT, overrides=end)
    assert not holds(condition, Action.PUT_OBJECT, overrides=begin)
    assert not holds(condition, Action.PUT_OBJECT)
    assert not holds({**condition, "Bool": {"aws:SecureTransport": True}}, Action.PUT_OBJECT, overrides=part)
    denial = {"StringNotEquals": {"s3:x-amz-acl": "bucket-owner-full-control"}}
    for deny_if in (denial, {"Null": {"s3:x-amz-acl": True}}):
        policy = [statement(**EVERYTHING), statement(**EVERYTHING, Effect="Deny", Condition=deny_if)]
        for query, effect in ((part, Effect.ALLOW), (end, Effect.ALLOW), (begin, Effect.DENY), ({}, Effect.DENY)):
            assert ask(policy, Action.PUT_OBJECT, request=Request(overrides=query)) is effect


@pytest.mark.parametrize("source", ["src/secret/a", "/src/secret/a", "src/%73ecret/a", "src%2Fsecret/a?versionId=null"])
def test_a_copys_source_is_seen_as_it_is_read(source: str) -> None:
    condition = {"StringLike": {"s3:x-amz-copy-source": "src/secret/*"}}
    assert holds(condition, Action.PUT_OBJECT, fields={"x-amz-copy-source": source})


def test_tags_of_the_object_and_of_the_request() -> None:
    row = ObjectRow("data", "key", (), 0, "etag", 0, "alice", Durability.LOCAL, tags={"Level": "open"})
    existing = {"StringEquals": {"s3:ExistingObjectTag/Level": "open"}}
    assert holds(existing, row=row)
    assert not holds(existing)
    assert not holds({"StringEquals": {"s3:ExistingObjectTag/level": "open"}}, row=row)
    requested = {"StringEquals": {"s3:requestobjecttag/a": "1"}}
    assert holds(requested, Action.PUT_OBJECT, tags={"a": "1"})
    assert holds(requested, Action.PUT_OBJECT_TAGGING, tags={"a": "1"})
    assert not holds(requested, Action.GET_OBJECT, tags={"a": "1"})
    names = {"ForAllValues:StringEquals": {"s3:RequestObjectTagKeys": ["a", "b"]}}
    assert holds(names, Action.PUT_OBJECT, tags={"a": "1"})
    assert not holds(names, Action.PUT_OBJECT, tags={"a": "1", "c": "1"})
    assert holds(
        {"ForAnyValue:StringEquals": {"s3:RequestObjectTagKeys": "c"}}, Action.PUT_OBJECT, tags={"a": "1", "c": "1"}
    )


def test_what_kvobj_has_not_is_absent() -> None:
    for key in ("aws:SourceVpce", "aws:PrincipalOrgID", "aws:PrincipalTag/team", "s3:object-lock-mode"):
        assert holds({"Null": {key: True}})
        assert not holds({"StringEquals": {key: "x"}})


def test_a_value_is_bounded_where_a_policy_asks_for_it() -> None:
    assert agent("StringLike", "x*", sent="x" * 2048)
    with pytest.raises(S3Error):
        agent("StringNotLike", "y*", sent="x" * 2049)
    assert holds({"Bool": {"aws:SecureTransport": False}}, fields={"user-agent": "x" * 2049})


@pytest.mark.parametrize("pattern", ["*" + "?a" * 60 + "*b", "*" + "a?" * 500 + "b", "*a?" * 300 + "b", "?" * 2000])
def test_a_whole_policy_of_slow_patterns_is_not_slow(pattern: str) -> None:
    values = [pattern] * (18_000 // (len(pattern) + 4))
    policy = [statement(**EVERYTHING, Condition={"StringLike": {"aws:UserAgent": values}})]
    request = Request(fields={"user-agent": "a" * 2048})
    ask(policy, request=request)  # compiled
    started = time.thread_time()
    ask(policy, request=request)
    assert time.thread_time() - started < 0.5


def test_conditions_must_all_hold() -> None:
    both = {"StringEquals": {"aws:username": "bob"}, "Bool": {"aws:SecureTransport": True}}
    assert not holds(both)
    assert holds(both, is_secure=True)


NETWORKS = [ip_network(text) for text in ("10.0.0.0/8", "fd00::/8")]


@pytest.mark.parametrize(
    ("remote", "forwarded", "source"),
    [
        ("192.0.2.1", "198.51.100.1", "192.0.2.1"),  # RustFS CVE-2026-21862: anybody can write the header
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "198.51.100.1, 10.0.0.2", "198.51.100.1"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1, nonsense", "10.0.0.1"),
        ("fd00::1", "2001:db8::5", "2001:db8::5"),
        ("::ffff:10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("", "198.51.100.1", ""),
    ],
)
def test_forwarded_addresses_count_from_trusted_proxies_only(remote: str, forwarded: str, source: str) -> None:
    assert source_address(remote, {"x-forwarded-for": forwarded}, NETWORKS) == source
    assert source_address(remote, {"x-forwarded-for": forwarded}, ()) == remote


def test_a_trusted_proxy_says_whether_the_client_spoke_tls() -> None:
    assert came_by_tls("10.0.0.1", {"x-forwarded-proto": "https"}, NETWORKS)
    assert not came_by_tls("10.0.0.1", {"x-forwarded-proto": "https, http"}, NETWORKS)
    assert not came_by_tls("192.0.2.1", {"x-forwarded-proto": "https"}, NETWORKS)
    assert not came_by_tls("10.0.0.1", {}, NETWORKS)
