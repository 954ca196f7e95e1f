"""Cross-origin rules: the document of them, and which request a rule fits."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.api import xml
from kvobj.api.cross_origin import match_rules
from kvobj.api.errors import S3Error
from kvobj.api.settings.cors import METHODS, cors_document, parse_cors
from kvobj.catalog.setting_rows import CorsRule

ORIGINS = st.text("ab.:/*", max_size=8)
PATTERNS = st.text("ab.:/", max_size=4).flatmap(
    lambda front: st.sampled_from([front, f"{front}*", f"*{front}", f"a*{front}"])
)


def document(*rules: str) -> bytes:
    return (
        f"<CORSConfiguration>{''.join(f'<CORSRule>{rule}</CORSRule>' for rule in rules)}</CORSConfiguration>".encode()
    )


def rule_xml(*, origin: str = "*", method: str = "GET", more: str = "") -> str:
    return f"<AllowedOrigin>{origin}</AllowedOrigin><AllowedMethod>{method}</AllowedMethod>{more}"


def rule(*origins: str, methods: tuple[str, ...] = ("GET",), headers: tuple[str, ...] = ()) -> CorsRule:
    return CorsRule("", origins, methods, headers)


def test_a_rule_is_taken_with_all_it_says_and_told_back() -> None:
    more = (
        "<AllowedMethod>PUT</AllowedMethod><AllowedHeader>x-AMZ-*</AllowedHeader><ExposeHeader>ETag</ExposeHeader>"
        "<ExposeHeader>x-amz-request-id</ExposeHeader><MaxAgeSeconds>3000</MaxAgeSeconds><ID>one</ID>"
    )
    rules = parse_cors(document(rule_xml(origin="http://*.test:80", more=more), rule_xml(origin="")))
    assert rules == (
        CorsRule("one", ("http://*.test:80",), ("GET", "PUT"), ("x-AMZ-*",), ("ETag", "x-amz-request-id"), 3000),
        CorsRule("", ("",), ("GET",)),
    )
    assert parse_cors(xml.document("CORSConfiguration", cors_document(rules))) == rules


@pytest.mark.parametrize(
    ("rules", "code", "words"),
    [
        ([], "MalformedXML", ""),
        ([""], "MalformedXML", ""),
        (["<AllowedOrigin>*</AllowedOrigin>"], "MalformedXML", ""),
        (["<AllowedMethod>GET</AllowedMethod>"], "MalformedXML", ""),
        ([rule_xml(more="<Unknown/>")], "MalformedXML", ""),
        ([rule_xml(more="<ID>a</ID><ID>b</ID>")], "MalformedXML", ""),
        ([rule_xml(more="<MaxAgeSeconds>-1</MaxAgeSeconds>")], "MalformedXML", ""),
        ([rule_xml(more="<MaxAgeSeconds>2147483648</MaxAgeSeconds>")], "MalformedXML", ""),
        ([rule_xml(more=f"<ID>{'i' * 256}</ID>")], "InvalidArgument", "255"),
        (
            [rule_xml(method="OPTIONS")],
            "InvalidRequest",
            "Found unsupported HTTP method in CORS config. Unsupported method is OPTIONS",
        ),
        ([rule_xml(method="get")], "InvalidRequest", "Unsupported method is get"),
        (
            [rule_xml(origin="*example*.com")],
            "InvalidRequest",
            'AllowedOrigin "*example*.com" can not have more than one wildcard.',
        ),
        (
            [rule_xml(more="<AllowedHeader>*x*</AllowedHeader>")],
            "InvalidRequest",
            'AllowedHeader "*x*" can not have more than one wildcard.',
        ),
        ([rule_xml(more="<ExposeHeader>x-*</ExposeHeader>")], "InvalidRequest", "wildcard for ExposeHeader"),
        ([rule_xml(more="<ExposeHeader>a&#13;&#10;b: c</ExposeHeader>")], "InvalidRequest", "no name of a header"),
        ([rule_xml() for _ in range(101)], "InvalidRequest", "100 rules"),
    ],
)
def test_what_s3_refuses_is_refused_in_its_words(rules: list[str], code: str, words: str) -> None:
    with pytest.raises(S3Error) as caught:
        parse_cors(document(*rules))
    assert caught.value.code == code
    assert words in caught.value.message


def test_a_hundred_rules_are_taken() -> None:
    assert len(parse_cors(document(*[rule_xml() for _ in range(100)]))) == 100


@given(data=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_rules_or_refused(data: bytes) -> None:
    for inside in (data, document(data.decode("latin-1"))):
        status = 200
        try:
            parse_cors(inside)
        except S3Error as error:
            status = error.status
        assert status in (200, 400)


@given(pattern=PATTERNS, origin=ORIGINS)
def test_a_wildcard_stands_for_any_text_also_none(pattern: str, origin: str) -> None:
    expected = re.fullmatch(".*".join(re.escape(piece) for piece in pattern.split("*")), origin) is not None
    found = match_rules([rule(pattern)], origin=origin, method="GET", requested=None)
    assert (found is not None) is expected
    if found is not None:
        assert found.origin == ("*" if pattern == "*" else origin)


@given(
    methods=st.lists(st.sampled_from(METHODS), min_size=1, max_size=3),
    method=st.sampled_from([*METHODS, "OPTIONS", "get", ""]),
)
def test_a_method_is_one_of_the_rules_or_nothing(methods: list[str], method: str) -> None:
    found = match_rules([rule("*", methods=tuple(methods))], origin="o", method=method, requested=None)
    assert (found is not None) is (method in methods)


@given(
    allowed=st.lists(st.sampled_from(["x-a", "X-B", "x-amz-*", "*"]), max_size=3),
    asked=st.lists(st.sampled_from(["x-a", "X-A", "x-b", "x-amz-meta-q", "other"]), max_size=4),
)
def test_every_header_asked_for_has_to_be_allowed_whatever_its_case(allowed: list[str], asked: list[str]) -> None:
    found = match_rules([rule("*", headers=tuple(allowed))], origin="o", method="GET", requested=" ,".join(asked))
    fits = all(any(fnmatch.fnmatchcase(name.lower(), each.lower()) for each in allowed) for name in asked)
    assert (found is not None) is fits
    if found is not None:
        assert found.headers == tuple(name.lower() for name in asked)


def test_the_first_rule_that_fits_decides() -> None:
    rules = [rule("https://a", methods=("PUT",)), rule("https://a", headers=("x-a",)), rule("*", headers=("*",))]
    put = match_rules(rules, origin="https://a", method="PUT", requested=None)
    assert put is not None
    assert put.rule is rules[0]
    asked = match_rules(rules, origin="https://a", method="GET", requested="x-a")
    assert asked is not None
    assert (asked.rule, asked.origin) == (rules[1], "https://a")
    other = match_rules(rules, origin="https://a", method="GET", requested="x-b")
    assert other is not None
    assert (other.rule, other.origin) == (rules[2], "*")
    assert match_rules(rules, origin="https://b", method="PUT", requested=None) is None


def test_only_what_a_rule_says_is_told_and_credentials_for_a_named_origin_alone() -> None:
    anybody = match_rules([rule("*")], origin="https://a", method="GET", requested=None)
    assert anybody is not None
    vary = "Origin, Access-Control-Request-Headers, Access-Control-Request-Method"
    assert dict(anybody.reply_headers()) == {
        "access-control-allow-origin": "*",
        "access-control-allow-methods": "GET",
        "vary": vary,
    }
    full = CorsRule("", ("https://*",), ("GET", "PUT"), ("*",), ("etag", "x-amz-id-2"), 3000)
    named = match_rules([full], origin="https://a", method="PUT", requested="Content-Type, x-amz-meta-b")
    assert named is not None
    assert dict(named.reply_headers()) == {
        "access-control-allow-origin": "https://a",
        "access-control-allow-methods": "GET, PUT",
        "access-control-allow-headers": "content-type, x-amz-meta-b",
        "access-control-expose-headers": "etag, x-amz-id-2",
        "access-control-max-age": "3000",
        "access-control-allow-credentials": "true",
        "vary": vary,
    }
