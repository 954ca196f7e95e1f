"""What a signature must prove before anything is done, each check by name, through the whole service.

Where a check has its test elsewhere, the table says where: S is tests/unit/test_sigv4.py, W tests/unit/test_aws_chunked.py,
E test_signature_examples.py, P test_published_cases.py, O tests/api/test_s3_objects.py, R tests/unit/test_s3_routing.py; names are
shown without `test_`, those without a letter are in this file.

1. The path as sent, encoded once: S `what_botocore_signs_is_verified`, `any_key_that_a_client_encodes_is_verified`,
   `lower_case_hex_and_raw_characters_are_the_same_path_as_their_canonical_form`,
   `a_plus_is_no_space_and_a_dot_segment_is_no_parent`.
2. The query, sorted and whole: S `what_botocore_signs_is_verified`; `the_handler_reads_the_values_that_were_signed`,
   `a_canonical_query_is_the_same_however_it_was_written`.
3. Headers: S `header_values_are_trimmed_and_folded`, `a_header_added_in_flight_is_refused`; R
   `a_header_that_must_be_single_is_refused_twice`; `repeated_headers_are_signed_joined_in_order`,
   `bytes_that_are_no_ascii_space_are_not_folded`, `every_unsigned_header_is_named`, `the_host_must_be_signed`.
4. One source of identity: S `two_sources_of_authentication_are_refused`; `a_request_may_prove_who_it_is_in_one_way_only`,
   `a_part_of_a_claim_is_no_anonymous_request`,
   `an_anonymous_request_cannot_claim_signed_chunks_or_a_token`; P `minio_cve_2026_41145_…`.
5. The payload's digest: S `a_missing_content_sha256_is_refused_for_header_authentication`,
   `an_unknown_content_sha256_fails_closed`; `a_body_of_another_digest_is_not_stored`,
   `a_wrong_signature_is_refused_before_the_body_is_asked_for`, `unsigned_payloads_can_be_kept_to_tls`.
6. Chunk signatures: E `each_signature_of_the_published_chunks_counts`, `the_published_trailer_counts`; W
   `only_the_last_chunk_may_be_small`, `a_signed_chunk_that_is_too_large_is_refused_before_it_is_read`,
   `a_line_without_end_is_bounded`, `malformed_framing_is_refused`; `a_chunk_with_a_wrong_signature_is_never_visible`,
   `a_small_chunk_before_the_last_is_named_with_its_size`.
7. No telling differences: `an_unknown_key_costs_the_work_of_a_wrong_secret`, `nothing_secret_is_said_or_logged`,
   `a_mismatch_is_explained_only_where_that_is_configured`.
8. The credential's scope: S `another_scope_is_refused`, `the_scope_is_of_the_day_of_the_request`,
   `version_2_and_malformed_headers_are_refused`; `another_algorithm_is_refused`, `a_wrong_region_is_told_the_right_one`.
9. Presigned URLs: S `a_presigned_url_binds_method_host_path_and_query`, `a_presigned_url_ends_and_does_not_begin_early`,
   `an_expiry_out_of_bounds_is_refused`; E `the_published_presigned_url_holds_for_its_day`; all of test_presigned_urls.py.
10. Policies of POST forms: `post_forms_are_not_implemented`.
11. Sources of copies: R `a_copy_source_that_climbs_or_is_malformed_is_refused`; O
   `reading_the_source_of_a_copy_needs_the_right_to`; P `rustfs_cve_2026_39360_…`.
12. Conditions after access: P `minio_cve_2024_36107_…`.
13. Internal headers: O `internal_headers_of_a_client_are_not_taken`; P `minio_cve_2026_34204_…`.
14. The socket's address: P `rustfs_cve_2026_21862_…`.
15. The scope's service routes nothing: S `another_scope_is_refused`; P `seaweedfs_cve_2026_55873_…`.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from s3_driver import (
    ALICE,
    HOST,
    Driver,
    FakeBody,
    chunk_key,
    presign,
    seed_of,
    sign,
    signed_chunks,
    unsigned_chunks,
)

from kvobj.api.exchange import S3Settings
from kvobj.api.message import RequestHead
from kvobj.api.request import HostRules, encode_value, parse_query, parse_target
from kvobj.api.sigv4 import ChunkSigning
from kvobj.catalog.rows import UserRow
from kvobj.catalog.setting_rows import BucketUpdate, Grant, GranteeGroup, Permission

DATA = b"0123456789" * 3000
STREAMING = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
STREAMING_UNSIGNED = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
UNSIGNED = "UNSIGNED-PAYLOAD"
MALLORY = UserRow("alice", "Alice", ALICE.access_key, "guessed")
SOMEBODY = UserRow("nobody", "Nobody", "AKUNKNOWN", "guessed")
Fields = list[tuple[str, str]]


@pytest.fixture
async def driver() -> Driver:
    made = Driver()
    await made.put("/bucket", b"")
    return made


def replaced(fields: Fields, name: str, value: str) -> Fields:
    return [(found, value if found == name else old) for found, old in fields]


def without(fields: Fields, name: str) -> Fields:
    return [pair for pair in fields if pair[0] != name]


# 2: the query


async def test_the_handler_reads_the_values_that_were_signed(driver: Driver) -> None:
    for key in ("a+b", "a b", "a%20b"):
        await driver.put(f"/bucket/{quote(key)}", b"")
    for key in ("a+b", "a b", "a%20b"):
        listed = await driver.get(f"/bucket?prefix={quote(key, safe='')}")
        assert listed.texts("Contents/Key") == [key]
    # A raw plus is a plus for the verifier (what it signs is %2B), and so it is for the listing.
    answer = await driver.send("GET", "/bucket?prefix=a+b", sign("GET", "/bucket?prefix=a%2Bb"))
    assert answer.texts("Contents/Key") == ["a+b"]


PIECES = (
    "a",
    "A",
    "0",
    "~",
    "-",
    ".",
    "_",
    "+",
    "*",
    "=",
    "%41",
    "%30",
    "%2B",
    "%2b",
    "%2F",
    "%7E",
    "%5F",
    "%C3%A9",
    "%c3%a9",
    "%00",
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=3).map("".join)


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["=", "=", "=", ""]), TEXTS).map("".join), max_size=5))
@example([f"{name}=%{code:02X}" for name, code in zip("abcdefgh", b"A.09_az~", strict=True)])
@example(["a=%c3%a9", "b=%2b", "c=%2F", "d==", "e", "%61=%2f"])
def test_a_canonical_query_is_the_same_however_it_was_written(pieces: list[str]) -> None:
    raw = "&".join(pieces)
    expected = sorted((encode_value(name), encode_value(value)) for name, value in parse_query(raw))
    found = parse_target(f"/?{raw}", HOST, HostRules()).canonical_query()
    assert found == "&".join(f"{name}={value}" for name, value in expected)


# 3: headers


async def test_repeated_headers_are_signed_joined_in_order(driver: Driver) -> None:
    signed = without(sign("PUT", "/bucket/key", headers={"x-amz-meta-a": "1,2"}), "x-amz-meta-a")
    in_order = [*signed, ("x-amz-meta-a", "1"), ("x-amz-meta-a", "2")]
    assert (
        await driver.send("PUT", "/bucket/key", [*signed, *reversed(in_order[-2:])])
    ).code == "SignatureDoesNotMatch"
    assert (await driver.send("PUT", "/bucket/key", in_order)).status == 200
    assert (await driver.get("/bucket/key")).headers["x-amz-meta-a"] == "1,2"


async def test_bytes_that_are_no_ascii_space_are_not_folded() -> None:
    driver = Driver(settings=S3Settings(explain_signatures=True))
    await driver.put("/bucket", b"")
    value = "voil\u00e0 \u0085 \u00a0".encode().decode("latin-1")  # as it arrives: UTF-8 that ends in 0xA0
    folded, value = value, value.replace(" ", " \t ")
    signed = sign("PUT", "/bucket/key", headers={"x-amz-meta-a": "?"})
    fields = replaced(signed, "x-amz-meta-a", f" {value}\t")
    explained = (await driver.send("PUT", "/bucket/key", fields)).xml
    assert f"\nx-amz-meta-a:{folded}\n" in (explained.findtext("CanonicalRequest") or "")
    text = (explained.findtext("StringToSign") or "").encode()
    signature = hmac.digest(chunk_key(ALICE, dict(signed)["x-amz-date"]), text, "sha256").hex()
    header = dict(signed)["authorization"]
    fields = replaced(fields, "authorization", header[: header.index("Signature=")] + f"Signature={signature}")
    assert (await driver.send("PUT", "/bucket/key", fields)).status == 200


async def test_every_unsigned_header_is_named(driver: Driver) -> None:
    added = [("x-amz-meta-a", "1"), ("user-agent", "free"), ("x-amz-acl", "private")]
    answer = await driver.send("PUT", "/bucket/key", [*sign("PUT", "/bucket/key"), *added])
    assert (answer.status, answer.code) == (403, "AccessDenied")
    assert answer.xml.findtext("HeadersNotSigned") == "x-amz-acl, x-amz-meta-a"


async def test_the_host_must_be_signed(driver: Driver) -> None:
    signed = sign("GET", "/bucket/key")
    header = dict(signed)["authorization"].replace("SignedHeaders=host;", "SignedHeaders=")
    answer = await driver.send("GET", "/bucket/key", replaced(signed, "authorization", header))
    assert (answer.code, answer.xml.findtext("HeadersNotSigned")) == ("AccessDenied", "host")


# 4: one source of identity


@pytest.mark.parametrize(
    "query",
    [
        "X-Amz-Algorithm=AWS4-HMAC-SHA256",
        "x-amz-signature=0",
        "X-Amz-Security-Token=t",
        "Signature=0",
        "AWSAccessKeyId=AKALICE",
        presign("GET", "/bucket/key").partition("?")[2],
    ],
)
async def test_a_request_may_prove_who_it_is_in_one_way_only(driver: Driver, query: str) -> None:
    answer = await driver.send("GET", f"/bucket/key?{query}", sign("GET", f"/bucket/key?{query}"))
    assert (answer.status, answer.code) == (400, "InvalidArgument")
    both = presign("GET", "/bucket/key") + "&Signature=0&AWSAccessKeyId=AKALICE"
    assert (await driver.send("GET", both, [("host", HOST)])).code == "InvalidRequest"


@pytest.mark.parametrize("query", ["X-Amz-Security-Token=t", "X-Amz-Signature=0", "x-amz-credential=AKALICE"])
async def test_a_part_of_a_claim_is_no_anonymous_request(driver: Driver, query: str) -> None:
    answer = await driver.send("GET", f"/bucket/key?{query}", [("host", HOST)])
    assert (answer.status, answer.code) == (400, "AuthorizationQueryParametersError")


async def test_an_anonymous_request_cannot_claim_signed_chunks_or_a_token(driver: Driver) -> None:
    body = signed_chunks([DATA], user=MALLORY, seed="0" * 64, stamp="20260101T000000Z")
    fields = [("host", HOST), ("x-amz-content-sha256", STREAMING), ("x-amz-decoded-content-length", str(len(DATA)))]
    assert (await driver.send("PUT", "/bucket/key", fields, body)).code == "InvalidRequest"
    fields = [("host", HOST), ("x-amz-security-token", "t")]
    assert (await driver.send("GET", "/bucket/key", fields)).code == "InvalidToken"


async def test_what_nobody_signed_is_held_to_the_digest_it_promises(driver: Driver) -> None:
    anybody = Grant("", GranteeGroup.ALL_USERS, Permission.WRITE)
    await driver.fake.catalog.update_bucket("bucket", BucketUpdate(acl=(anybody,)))
    host, digest = ("host", HOST), hashlib.sha256(DATA).hexdigest()
    promised = [host, ("x-amz-content-sha256", digest)]
    assert (await driver.send("PUT", "/bucket/key", promised, DATA[::-1])).code == "XAmzContentSHA256Mismatch"
    framed = [host, ("x-amz-content-sha256", STREAMING_UNSIGNED), ("x-amz-decoded-content-length", str(len(DATA)))]
    trailer = [("x-amz-checksum-crc32", "AAAAAA==")]
    wrong = [*framed, ("x-amz-trailer", "x-amz-checksum-crc32")]
    assert (await driver.send("PUT", "/bucket/key", wrong, unsigned_chunks([DATA], trailer))).code == "BadDigest"
    assert not driver.fake.catalog.objects
    assert (await driver.send("PUT", "/bucket/key", promised, DATA)).status == 200
    assert (await driver.send("PUT", "/bucket/key", framed, unsigned_chunks([DATA]))).status == 200
    assert (
        await driver.send("PUT", "/bucket/key", [host, ("x-amz-content-sha256", "x")], DATA)
    ).code == "InvalidArgument"


async def test_an_empty_authorization_header_is_nobody(driver: Driver) -> None:
    answer = await driver.send("GET", "/bucket/key", [("host", HOST), ("authorization", "")])
    assert (answer.status, answer.code) == (403, "AccessDenied")


# 5: the payload


async def test_a_body_of_another_digest_is_not_stored(driver: Driver) -> None:
    signed = sign("PUT", "/bucket/key", DATA)
    refused = await driver.send("PUT", "/bucket/key", signed, DATA[::-1])
    assert refused.code == "XAmzContentSHA256Mismatch"
    assert refused.xml.findtext("ClientComputedContentSHA256") == hashlib.sha256(DATA).hexdigest()
    assert refused.xml.findtext("S3ComputedContentSHA256") == hashlib.sha256(DATA[::-1]).hexdigest()
    assert (await driver.get("/bucket/key")).status == 404


@pytest.mark.parametrize("mode", [STREAMING, f"{STREAMING}-TRAILER", STREAMING_UNSIGNED, UNSIGNED, "0" * 64])
async def test_a_wrong_signature_is_refused_before_the_body_is_asked_for(driver: Driver, mode: str) -> None:
    body = FakeBody(DATA)
    headers = {"x-amz-decoded-content-length": str(len(DATA)), "expect": "100-continue"}
    answer = await driver.request("PUT", "/bucket/key", body=body, headers=headers, user=MALLORY, payload=mode)
    assert (answer.code, body.accepted, body.unread_bytes) == ("SignatureDoesNotMatch", False, len(DATA))
    assert answer.reply.close


async def test_unsigned_payloads_can_be_kept_to_tls() -> None:
    driver = Driver(settings=S3Settings(unsigned_payload_needs_tls=True))
    await driver.put("/bucket", b"")
    framed = unsigned_chunks([DATA])
    chunked = {"x-amz-decoded-content-length": str(len(DATA))}
    requests = (
        (sign("PUT", "/bucket/key", payload=UNSIGNED), "/bucket/key", DATA),
        (sign("PUT", "/bucket/key", payload=STREAMING_UNSIGNED, headers=chunked), "/bucket/key", framed),
        ([("host", HOST)], presign("PUT", "/bucket/key"), DATA),
    )
    for fields, target, body in requests:
        refused = await driver.send("PUT", target, fields, body)
        assert (refused.status, refused.code) == (400, "InvalidRequest")
        assert "TLS" in (refused.xml.findtext("Message") or "")
        head = RequestHead("PUT", target, (*fields, ("content-length", str(len(body)))), "ID", "", is_tls=True)
        assert (await driver.service.handle(head, FakeBody(body))).status == 200
    assert (await driver.put("/bucket/key", DATA)).status == 200
    assert (await driver.request("GET", "/bucket/key", payload=UNSIGNED)).status == 200


# 6: chunks


async def test_a_chunk_with_a_wrong_signature_is_never_visible(driver: Driver) -> None:
    await driver.put("/bucket/key", b"before")
    pieces = [DATA, DATA[:100]]
    headers = {"x-amz-decoded-content-length": str(len(DATA) + 100)}
    signed = sign("PUT", "/bucket/key", headers=headers, payload=STREAMING)
    seed, stamp = seed_of(signed)
    body = signed_chunks(pieces, user=ALICE, seed=seed, stamp=stamp)
    for changed in (body.replace(DATA[:50], DATA[1:51], 1), body[:-200] + bytes(100) + body[-100:]):
        answer = await driver.send("PUT", "/bucket/key", signed, changed)
        assert answer.status in (400, 403)
        assert (await driver.get("/bucket/key")).body == b"before"
    other = signed_chunks(pieces, user=MALLORY, seed=seed, stamp=stamp)
    assert (await driver.send("PUT", "/bucket/key", signed, other)).code == "SignatureDoesNotMatch"
    assert (await driver.send("PUT", "/bucket/key", signed, body)).status == 200
    assert (await driver.get("/bucket/key")).body == DATA + DATA[:100]


async def test_a_small_chunk_before_the_last_is_named_with_its_size(driver: Driver) -> None:
    for pieces, count in (([DATA[:8191], DATA[:10]], 1), ([DATA[:8192], DATA[:5], DATA[:10]], 2)):
        size = sum(map(len, pieces))
        signed = sign("PUT", "/bucket/key", headers={"x-amz-decoded-content-length": str(size)}, payload=STREAMING)
        seed, stamp = seed_of(signed)
        body = signed_chunks(pieces, user=ALICE, seed=seed, stamp=stamp)
        answer = await driver.send("PUT", "/bucket/key", signed, body)
        assert (answer.status, answer.code) == (403, "InvalidChunkSizeError")
        assert answer.xml.findtext("Chunk") == str(count)
        assert answer.xml.findtext("BadChunkSize") == str(len(pieces[count - 1]))


# 7: no telling differences


@contextmanager
def counted_hashes() -> Iterator[list[str]]:
    """The names of the C functions of hashing and comparing that run, in order."""
    names: list[str] = []

    def note(_frame: FrameType, event: str, called: object) -> None:
        name = getattr(called, "__name__", "")
        is_hash = type(getattr(called, "__self__", None)).__module__ == "_hashlib"
        if event == "c_call" and (is_hash or name in ("compare_digest", "_compare_digest", "openssl_sha256")):
            names.append(name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


async def test_an_unknown_key_costs_the_work_of_a_wrong_secret(driver: Driver) -> None:
    counts = []
    for user in (MALLORY, SOMEBODY):
        fields = sign("GET", "/bucket/key", user=user)
        await driver.send("GET", "/bucket/key", fields)  # derives the keys that are remembered
        with counted_hashes() as names:
            answer = await driver.send("GET", "/bucket/key", fields)
        assert answer.status == 403
        counts.append(names)
    assert counts[0] == counts[1]
    assert {"openssl_sha256", "update", "hexdigest"} < set(counts[0])
    assert counts[0][-1].endswith("compare_digest")


@pytest.mark.parametrize("signature", ["0" * 63, "0" * 65, "g" * 64, "\xe9" * 64, "0" * 63 + "\xb2", "null"])
async def test_a_signature_that_is_none_matches_nothing(driver: Driver, signature: str) -> None:
    signed = sign("GET", "/bucket")
    fields = replaced(signed, "authorization", dict(signed)["authorization"][:-64] + signature)
    answer = await driver.send("GET", "/bucket", fields)
    assert (answer.status, answer.code) == (403, "SignatureDoesNotMatch")
    target = presign("GET", "/bucket")[:-64] + quote(signature)
    assert (await driver.send("GET", target, [("host", HOST)])).code == "SignatureDoesNotMatch"


async def test_nothing_secret_is_said_or_logged(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "test")
    signed = sign("GET", "/bucket/key")
    header = dict(signed)["authorization"]
    right = header[-64:]
    wrong = right[:-1] + ("0" if right[-1] != "0" else "1")
    answers = [
        await driver.send("GET", "/bucket/key", replaced(signed, "authorization", header[:-64] + wrong)),
        await driver.send("GET", "/bucket/key", sign("GET", "/bucket/key", user=MALLORY)),
        await driver.send("GET", presign("GET", "/bucket/key", user=MALLORY), [("host", HOST)]),
        await driver.send("GET", "/bucket/key", replaced(signed, "authorization", "Basic cGFzczp3b3Jk")),
    ]
    said = b"".join(answer.body for answer in answers) + repr([answer.reply.log for answer in answers]).encode()
    for secret in (ALICE.secret_key, right, "StringToSign", "CanonicalRequest", "cGFzczp3b3Jk"):
        assert secret.encode() not in said
        assert secret not in caplog.text
    assert ALICE.secret_key not in repr(ALICE)
    assert "secret key" not in repr(ChunkSigning(b"secret key", "0", "0", "0"))
    assert answers[0].xml.findtext("AWSAccessKeyId") == ALICE.access_key
    assert answers[0].xml.findtext("SignatureProvided") == wrong


async def test_a_mismatch_is_explained_only_where_that_is_configured() -> None:
    driver = Driver(settings=S3Settings(explain_signatures=True))
    signed = sign("GET", "/bucket/a%20b?prefix=x")
    header = dict(signed)["authorization"]
    wrong = replaced(signed, "authorization", header[:-64] + "0" * 64)
    answer = await driver.send("GET", "/bucket/a%20b?prefix=x", wrong)
    canonical = answer.xml.findtext("CanonicalRequest") or ""
    assert canonical.startswith("GET\n/bucket/a%20b\nprefix=x\nhost:127.0.0.1:9000\n")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    assert (answer.xml.findtext("StringToSign") or "").endswith(f"/us-east-1/s3/aws4_request\n{digest}")
    assert header[-64:].encode() not in answer.body
    assert ALICE.secret_key.encode() not in answer.body


# 8: time and scope


async def test_a_digest_whose_header_is_not_named_is_signed_all_the_same(driver: Driver) -> None:
    digest = hashlib.sha256(DATA).hexdigest()
    stamp = dict(sign("GET", "/bucket"))["x-amz-date"]
    names, scope = "host;x-amz-date", f"{stamp[:8]}/us-east-1/s3/aws4_request"
    canonical = f"PUT\n/bucket/key\n\nhost:{HOST}\nx-amz-date:{stamp}\n\n{names}\n{digest}"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(chunk_key(ALICE, stamp), text.encode(), "sha256").hex()
    authorization = f"AWS4-HMAC-SHA256 Credential=AKALICE/{scope},SignedHeaders={names},Signature={signature}"
    fields = [("host", HOST), ("x-amz-date", stamp), ("authorization", authorization)]
    fields.append(("content-length", str(len(DATA))))
    stored = await driver.send("PUT", "/bucket/key", [*fields, ("x-amz-content-sha256", digest)], DATA)
    assert stored.status == 200
    for other in (UNSIGNED, hashlib.sha256(b"other").hexdigest()):
        spoiled = await driver.send("PUT", "/bucket/key", [*fields, ("x-amz-content-sha256", other)], DATA)
        assert spoiled.code == "SignatureDoesNotMatch"


@pytest.mark.parametrize(
    "shape", ["%a, %d %b %Y %H:%M:%S GMT", "%A, %d-%b-%y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y", "%Y%m%dT%H%M%SZ"]
)
async def test_a_date_header_serves_in_each_of_its_forms(driver: Driver, shape: str) -> None:
    signed = without(sign("GET", "/bucket", headers={"x-amz-date": "?"}), "authorization")
    stamp = dict(signed)["x-amz-date"]
    at = dt.datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=dt.UTC)
    date = at.strftime(shape)
    names = "date;host;x-amz-content-sha256"
    lines = f"date:{date}\nhost:{HOST}\nx-amz-content-sha256:{UNSIGNED}\n"
    canonical = f"GET\n/bucket\n\n{lines}\n{names}\n{UNSIGNED}"
    scope = f"{stamp[:8]}/us-east-1/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(chunk_key(ALICE, stamp), text.encode(), "sha256").hex()
    credential = f"AWS4-HMAC-SHA256 Credential=AKALICE/{scope},SignedHeaders={names}"
    fields = [("host", HOST), ("date", date), ("x-amz-content-sha256", UNSIGNED)]
    assert (
        await driver.send("GET", "/bucket", [*fields, ("authorization", f"{credential},Signature={signature}")])
    ).status == 200
    # x-amz-date counts where both came, and the order of the parts is free.
    reordered = f"AWS4-HMAC-SHA256 Signature={signature}, SignedHeaders={names}, Credential=AKALICE/{scope}"
    assert (await driver.send("GET", "/bucket", [*fields, ("authorization", reordered)])).status == 200
    spoiled = [*replaced(fields, "date", (at - dt.timedelta(days=365)).strftime(shape)), ("authorization", reordered)]
    assert (await driver.send("GET", "/bucket", spoiled)).code == "RequestTimeTooSkewed"


@pytest.mark.parametrize(
    "date", ["", "yesterday", "20260230T000000Z", "20260101T250000Z", "9" * 70, "Fri, 99 Foo 2026 00:00:00 GMT"]
)
async def test_a_request_without_a_date_is_denied(driver: Driver, date: str) -> None:
    signed = sign("GET", "/bucket")
    for fields in (replaced(signed, "x-amz-date", date), [*without(signed, "x-amz-date"), ("date", date)]):
        answer = await driver.send("GET", "/bucket", fields)
        assert (answer.status, answer.code) == (403, "AccessDenied")


async def test_a_wrong_region_is_told_the_right_one() -> None:
    driver = Driver(settings=S3Settings(region="eu-west-1"))
    answer = await driver.send("GET", "/bucket", sign("GET", "/bucket", region="mars-1"))
    assert (answer.status, answer.code) == (400, "AuthorizationHeaderMalformed")
    assert answer.xml.findtext("Region") == answer.headers["x-amz-bucket-region"] == "eu-west-1"
    answer = await driver.send("GET", presign("GET", "/bucket", region="mars-1"), [("host", HOST)])
    assert (answer.status, answer.code) == (400, "AuthorizationQueryParametersError")
    assert answer.xml.findtext("Region") == "eu-west-1"


@pytest.mark.parametrize("algorithm", ["AWS4-ECDSA-P256-SHA256", "none", "AWS4-HMAC-SHA1", ""])
async def test_another_algorithm_is_refused(driver: Driver, algorithm: str) -> None:
    target = presign("GET", "/bucket").replace("AWS4-HMAC-SHA256", algorithm)
    assert (await driver.send("GET", target, [("host", HOST)])).code == "AuthorizationQueryParametersError"
    signed = sign("GET", "/bucket")
    header = dict(signed)["authorization"].replace("AWS4-HMAC-SHA256", algorithm)
    answer = await driver.send("GET", "/bucket", replaced(signed, "authorization", header))
    assert answer.code == ("InvalidRequest" if algorithm.startswith("AWS4-") else "InvalidArgument")


# 10: forms


async def test_post_forms_are_not_implemented(driver: Driver) -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="key"\r\n\r\nk\r\n--b--\r\n'
    fields = [("host", HOST), ("content-type", "multipart/form-data; boundary=b")]
    answer = await driver.send("POST", "/bucket", fields, form)
    assert (answer.status, answer.code) == (501, "NotImplemented")
    assert (await driver.get("/bucket")).texts("Contents/Key") == []
