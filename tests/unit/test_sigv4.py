"""The checklist of signatures: each case by name."""

import datetime as dt
from collections.abc import Sequence
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_driver import ALICE, BOB, HOST, Driver, WallClock, presign, sign

from kvobj.api.credential import CredentialParser
from kvobj.api.errors import S3Error
from kvobj.api.message import RequestHead
from kvobj.api.request import HostRules, parse_fields, parse_target
from kvobj.api.sigv4 import Authentication, PayloadMode, SignatureVerifier
from kvobj.catalog.rows import UserRow

MODES = [mode.value for mode in PayloadMode if mode is not PayloadMode.HASHED] + ["0" * 64]
Fields = Sequence[tuple[str, str]]


def verify(
    method: str, target: str, headers: Fields, *, user: UserRow | None = ALICE, clock: WallClock | None = None
) -> Authentication | None:
    fields = parse_fields(RequestHead(method, target, tuple(headers), "ID", ""))
    parsed = parse_target(target, fields.get("host", ""), HostRules())
    credential = CredentialParser(frozenset({"us-east-1", "eu-west-1"})).parse(fields, parsed)
    if credential is None:
        return None
    return SignatureVerifier(clock or WallClock()).verify(credential, user, method=method, target=parsed, fields=fields)


def code_of(method: str, target: str, headers: Fields, **keywords: object) -> str:
    with pytest.raises(S3Error) as caught:
        verify(method, target, headers, **keywords)  # type: ignore[arg-type]
    return caught.value.code


def changed(headers: Fields, name: str, value: str | None) -> list[tuple[str, str]]:
    kept = [pair for pair in headers if pair[0] != name]
    return kept if value is None else [*kept, (name, value)]


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "/bucket/key",
        "/bucket/a%20b%2Fc",
        "/bucket//a//b/../c",
        "/bucket/%C3%A9~-_.",
        "/bucket/a%2Bb",
        "/bucket/key?uploads",
        "/bucket/key?uploads=",
        "/bucket?prefix=a%20b%2F&delimiter=%2F&list-type=2",
        "/bucket?b=2&a=1&a=0&c",
        "/bucket?prefix=%2B",
    ],
)
def test_what_botocore_signs_is_verified(target: str) -> None:
    found = verify("GET", target, sign("GET", target))
    assert found is not None
    assert found.user is ALICE


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40))
def test_any_key_that_a_client_encodes_is_verified(key: str) -> None:
    target = f"/bucket/{quote(key, safe='/~')}?marker={quote(key, safe='')}"
    try:
        assert verify("GET", target, sign("GET", target)) is not None
    except S3Error as error:
        assert ".." in key, error  # noqa: PT017 - the one refusal there may be


def test_lower_case_hex_and_raw_characters_are_the_same_path_as_their_canonical_form() -> None:
    signed = sign("GET", "/bucket/a%2Fb%20c%21")
    assert verify("GET", "/bucket/a%2fb%20c!", signed) is not None
    assert code_of("GET", "/bucket/a/b%20c!", signed) == "SignatureDoesNotMatch"


def test_a_plus_is_no_space_and_a_dot_segment_is_no_parent() -> None:
    assert code_of("GET", "/bucket/a%20b", sign("GET", "/bucket/a+b")) == "SignatureDoesNotMatch"
    assert code_of("GET", "/bucket/b", sign("GET", "/bucket/a/../b")) == "SignatureDoesNotMatch"
    assert code_of("GET", "/bucket?prefix=a%20b", sign("GET", "/bucket?prefix=a%2Bb")) == "SignatureDoesNotMatch"


def test_a_changed_method_path_query_header_or_secret_does_not_verify() -> None:
    signed = sign("GET", "/bucket/key?prefix=a", headers={"x-amz-meta-a": "1"})
    assert code_of("PUT", "/bucket/key?prefix=a", signed) == "SignatureDoesNotMatch"
    assert code_of("GET", "/bucket/yek?prefix=a", signed) == "SignatureDoesNotMatch"
    assert code_of("GET", "/bucket/key?prefix=b", signed) == "SignatureDoesNotMatch"
    assert code_of("GET", "/bucket/key?prefix=a&prefix=a", signed) == "SignatureDoesNotMatch"
    assert code_of("GET", "/bucket/key?prefix=a", changed(signed, "x-amz-meta-a", "2")) == "SignatureDoesNotMatch"
    assert code_of("GET", "/bucket/key?prefix=a", changed(signed, "host", "other")) == "SignatureDoesNotMatch"
    assert code_of("GET", "/bucket/key?prefix=a", signed, user=BOB) == "SignatureDoesNotMatch"


def test_header_values_are_trimmed_and_folded() -> None:
    signed = sign("GET", "/bucket/k", headers={"x-amz-meta-a": "a  b"})
    assert verify("GET", "/bucket/k", changed(signed, "x-amz-meta-a", " a    b ")) is not None


@pytest.mark.parametrize(
    "name",
    [
        "x-amz-copy-source",
        "x-amz-acl",
        "x-amz-meta-a",
        "x-amz-decoded-content-length",
        "content-md5",
        "x-kvobj-namespace",
        "x-kvobj-parent",
        "x-kvobj-bucket-kind",
    ],
)
def test_a_header_added_in_flight_is_refused(name: str) -> None:
    assert code_of("PUT", "/bucket/key", [*sign("PUT", "/bucket/key"), (name, "x")]) == "AccessDenied"


def test_a_content_type_may_be_unsigned_and_holds_where_it_is_signed() -> None:
    field = ("content-type", "text/plain")
    assert verify("PUT", "/bucket/key", [*sign("PUT", "/bucket/key"), field]) is not None
    signed = sign("PUT", "/bucket/key", headers=dict([field]))
    assert code_of("PUT", "/bucket/key", changed(signed, "content-type", "text/html")) == "SignatureDoesNotMatch"


def test_durability_and_want_may_ride_unsigned() -> None:
    assert verify("PUT", "/bucket/key", [*sign("PUT", "/bucket/key"), ("x-kvobj-durability", "local")]) is not None


@pytest.mark.parametrize("mode", MODES)
def test_every_payload_mode_needs_the_right_secret(mode: str) -> None:
    headers = {"x-amz-decoded-content-length": "0"}
    mallory = UserRow("alice", "Alice", ALICE.access_key, "guessed")
    assert verify("PUT", "/bucket/key", sign("PUT", "/bucket/key", payload=mode, headers=headers)) is not None
    assert (
        code_of("PUT", "/bucket/key", sign("PUT", "/bucket/key", payload=mode, headers=headers, user=mallory))
        == "SignatureDoesNotMatch"
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_payload_mode_beside_query_credentials_needs_the_right_secret(mode: str) -> None:
    mallory = UserRow("alice", "Alice", ALICE.access_key, "guessed")
    target = presign("PUT", "/bucket/key", user=mallory)
    assert code_of("PUT", target, [("host", HOST), ("x-amz-content-sha256", mode)]) in (
        "AccessDenied",
        "SignatureDoesNotMatch",
    )
    assert code_of("PUT", target, [("host", HOST)]) == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "unsigned-payload",
        "STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD",
        "STREAMING-UNSIGNED-PAYLOAD",
        "0" * 63,
        "G" * 64,
        "A" * 64,
    ],
)
def test_an_unknown_content_sha256_fails_closed(value: str) -> None:
    signed = changed(sign("PUT", "/bucket/key"), "x-amz-content-sha256", value)
    assert code_of("PUT", "/bucket/key", signed) == "InvalidArgument"


def test_a_missing_content_sha256_is_refused_for_header_authentication() -> None:
    assert (
        code_of("PUT", "/bucket/key", changed(sign("PUT", "/bucket/key"), "x-amz-content-sha256", None))
        == "InvalidRequest"
    )


def test_two_sources_of_authentication_are_refused() -> None:
    target = presign("GET", "/bucket/key")
    assert code_of("GET", target, sign("GET", "/bucket/key")) == "InvalidArgument"


def test_no_credentials_are_no_identity() -> None:
    assert verify("GET", "/bucket/key", [("host", HOST)]) is None


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("AWS AKALICE:c2lnbmF0dXJl", "InvalidRequest"),
        ("AWS4-ECDSA-P256-SHA256 Credential=a", "InvalidRequest"),
        ("AWS HAHAHA", "InvalidArgument"),
        ("none", "InvalidArgument"),
        ("Bearer token", "InvalidArgument"),
        ("AWS4-HMAC-SHA256 ", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 Credential=HAHAHA", "AuthorizationHeaderMalformed"),
        ("AWS4-HMAC-SHA256 Credential=a, SignedHeaders=host, Signature=" + "0" * 64, "AuthorizationHeaderMalformed"),
    ],
)
def test_version_2_and_malformed_headers_are_refused(header: str, code: str) -> None:
    assert code_of("GET", "/bucket/key", changed(sign("GET", "/bucket/key"), "authorization", header)) == code


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/s3/", "/ec2/"),
        ("/s3/", "/iam/"),
        ("aws4_request", "aws4"),
        ("us-east-1", "mars-1"),
        ("SignedHeaders=host;", "SignedHeaders=Host;"),
        ("SignedHeaders=host;", "SignedHeaders=host;host;"),
        ("SignedHeaders=host;x-amz-content-sha256;", "SignedHeaders=x-amz-content-sha256;host;"),
        ("SignedHeaders=", "Signed="),
        (", Signature=", ", Signature=0, Signature="),
        ("AKALICE", ""),
        ("AKALICE", "AK\xe9"),
    ],
)
def test_another_scope_is_refused(old: str, new: str) -> None:
    signed = sign("GET", "/bucket/key")
    header = dict(signed)["authorization"].replace(old, new)
    assert code_of("GET", "/bucket/key", changed(signed, "authorization", header)) == "AuthorizationHeaderMalformed"


def test_the_configured_region_is_accepted_and_a_wrong_one_names_it() -> None:
    assert verify("GET", "/bucket/key", sign("GET", "/bucket/key", region="eu-west-1")) is not None
    with pytest.raises(S3Error) as caught:
        verify("GET", "/bucket/key", sign("GET", "/bucket/key", region="mars-1"))
    assert caught.value.data["Region"] == "eu-west-1"


def test_the_scope_is_of_the_day_of_the_request() -> None:
    signed = sign("GET", "/bucket/key")
    today = dt.datetime.now(dt.UTC).strftime("%Y%m%d")
    header = dict(signed)["authorization"].replace(today, "20200101")
    assert code_of("GET", "/bucket/key", changed(signed, "authorization", header)) == "AuthorizationHeaderMalformed"


@pytest.mark.parametrize("offset_ms", [-16 * 60_000, 16 * 60_000])
def test_a_clock_that_is_off_is_told_so(offset_ms: int) -> None:
    clock = WallClock()
    clock.offset_ms = offset_ms
    assert code_of("GET", "/bucket/key", sign("GET", "/bucket/key"), clock=clock) == "RequestTimeTooSkewed"
    clock.offset_ms = offset_ms // 2
    assert verify("GET", "/bucket/key", sign("GET", "/bucket/key"), clock=clock) is not None


def test_an_unknown_user_is_refused_whatever_the_signature() -> None:
    assert code_of("GET", "/bucket/key", sign("GET", "/bucket/key"), user=None) == "InvalidAccessKeyId"


def test_a_presigned_url_binds_method_host_path_and_query() -> None:
    target = presign("GET", "/bucket/key?versionId=null")
    headers = [("host", HOST)]
    found = verify("GET", target, headers)
    assert found is not None
    assert found.payload_mode is PayloadMode.UNSIGNED
    assert code_of("HEAD", target, headers) == "SignatureDoesNotMatch"
    assert code_of("PUT", target, headers) == "SignatureDoesNotMatch"
    assert code_of("GET", target, [("host", "127.0.0.1:9001")]) == "SignatureDoesNotMatch"
    assert code_of("GET", target.replace("/key", "/yek"), headers) == "SignatureDoesNotMatch"
    assert code_of("GET", target + "&response-content-type=text%2Fhtml", headers) == "SignatureDoesNotMatch"
    assert code_of("GET", target + "&X-Amz-Signature=" + "0" * 64, headers) == "AuthorizationQueryParametersError"


def test_a_presigned_url_ends_and_does_not_begin_early() -> None:
    clock = WallClock()
    target = presign("GET", "/bucket/key", expires_seconds=60)
    clock.offset_ms = 59_000
    assert verify("GET", target, [("host", HOST)], clock=clock) is not None
    clock.offset_ms = 62_000
    assert code_of("GET", target, [("host", HOST)], clock=clock) == "AccessDenied"
    clock.offset_ms = -16 * 60_000
    assert code_of("GET", target, [("host", HOST)], clock=clock) == "AccessDenied"


@pytest.mark.parametrize("seconds", ["604801", "-1", "abc", "99999999999", "1e3", "+5", "\u0661", ""])
def test_an_expiry_out_of_bounds_is_refused(seconds: str) -> None:
    target = presign("GET", "/bucket/key").replace("X-Amz-Expires=60", f"X-Amz-Expires={seconds}")
    assert code_of("GET", target, [("host", HOST)]) == "AuthorizationQueryParametersError"


@pytest.mark.parametrize(
    "name",
    ["X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Date", "X-Amz-Expires", "X-Amz-SignedHeaders", "X-Amz-Signature"],
)
def test_a_presigned_url_without_one_of_its_parameters_is_refused(name: str) -> None:
    path, _, query = presign("GET", "/bucket/key").partition("?")
    target = path + "?" + "&".join(piece for piece in query.split("&") if not piece.startswith(name + "="))
    assert code_of("GET", target, [("host", HOST)]) == "AuthorizationQueryParametersError"


def test_a_presigned_url_of_version_2_is_refused() -> None:
    assert (
        code_of("GET", "/bucket/key?AWSAccessKeyId=AKALICE&Signature=x&Expires=1", [("host", HOST)]) == "InvalidRequest"
    )


@given(
    st.text(alphabet=st.characters(max_codepoint=255), max_size=120),
    st.text(alphabet=st.characters(max_codepoint=255), max_size=60),
)
def test_any_authorization_header_and_date_are_refused_without_a_defect(header: str, date: str) -> None:
    signed = sign("GET", "/bucket/key")
    for name, value in (
        ("authorization", "x" + header),
        ("authorization", "AWS4-HMAC-SHA256 " + header),
        ("x-amz-date", date),
    ):
        with pytest.raises(S3Error):
            verify("GET", "/bucket/key", changed(signed, name, value))


async def test_an_error_body_tells_nothing_secret() -> None:
    driver = Driver()
    await driver.put("/bucket", b"")
    answer = await driver.send("GET", "/bucket/key", sign("GET", "/bucket/yek"))
    assert answer.code == "SignatureDoesNotMatch"
    assert b"StringToSign" not in answer.body
    assert ALICE.secret_key.encode() not in answer.body
