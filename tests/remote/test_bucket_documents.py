"""Documents, errors, signatures and heads: what is written is read, what is no document is refused."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import Final
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobj.config import RemoteSettings
from kvobj.errors import KvobjError, RemoteRefusedError, StoreFullError, TierUnavailableError
from kvobj.tiers.remote.documents import (
    RemotePart,
    complete_document,
    delete_document,
    http_date_ms,
    parse_completed,
    parse_not_deleted,
    parse_objects,
    parse_upload_id,
    parse_uploads,
    quoted,
)
from kvobj.tiers.remote.faults import error_of, fault_of_answer
from kvobj.tiers.remote.signing import RequestSigner
from kvobj.tiers.remote.writing import multipart_etag
from kvobj.wire.response_head import BrokenAnswerError

KEYS: Final = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=60)
PARSERS: Final = [parse_objects, parse_uploads, parse_upload_id, parse_completed, parse_not_deleted]


@given(st.lists(st.tuples(KEYS, st.integers(0, 2**50)), max_size=8), st.booleans())
def test_a_page_of_objects_comes_back_whatever_the_keys_are(
    entries: list[tuple[str, int]],
    is_truncated: bool,  # noqa: FBT001 - drawn
) -> None:
    inside = "".join(
        f"<Contents><Key>{quote_plus(key)}</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified>"
        f"<ETag>&quot;e&quot;</ETag><Size>{size}</Size></Contents>"
        for key, size in entries
    )
    page = parse_objects(
        f'<?xml version="1.0"?><ListBucketResult xmlns="urn:x"><EncodingType>url</EncodingType>'
        f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>{inside}</ListBucketResult>".encode()
    )
    assert [(each.key, each.size_bytes) for each in page.objects] == entries
    assert {(each.etag, each.modified_ms) for each in page.objects} <= {('"e"', 1767323045678)}
    assert page.is_truncated is is_truncated


def test_a_page_without_encoding_and_of_uploads_is_read_too() -> None:
    page = parse_objects(
        b"<ListBucketResult><Contents><Key>a+b%20&amp;</Key><Size>1</Size></Contents></ListBucketResult>"
    )
    assert [(each.key, each.etag, each.modified_ms) for each in page.objects] == [("a+b%20&", "", 0)]
    uploads = parse_uploads(
        b"<ListMultipartUploadsResult><IsTruncated>true</IsTruncated><NextKeyMarker>k</NextKeyMarker>"
        b"<NextUploadIdMarker>u</NextUploadIdMarker><Upload><Key>k</Key><UploadId>u</UploadId>"
        b"<Initiated>2026-01-02T03:04:05.678Z</Initiated></Upload></ListMultipartUploadsResult>"
    )
    assert (uploads.is_truncated, uploads.next_key, uploads.next_upload_id) == (True, "k", "u")
    assert [(each.key, each.upload_id, each.initiated_ms) for each in uploads.uploads] == [("k", "u", 1767323045678)]


@given(st.binary(max_size=200) | st.text(st.sampled_from("<>/&;!ab\"'= "), max_size=80).map(str.encode))
def test_what_is_no_document_is_refused_and_nothing_else_happens(body: bytes) -> None:
    for parse in PARSERS:
        with pytest.raises(BrokenAnswerError):
            parse(body)
    assert isinstance(error_of(body), tuple)


@pytest.mark.parametrize("parse", PARSERS, ids=lambda each: each.__name__)
def test_declarations_and_other_documents_are_refused(parse: object) -> None:
    assert callable(parse)
    bomb = b'<!DOCTYPE a [<!ENTITY a "aaaa">]><ListBucketResult><Contents><Key>&a;</Key></Contents></ListBucketResult>'
    for body in (bomb, b"<Error><Code>SlowDown</Code></Error>", b"<html></html>", b""):
        with pytest.raises(BrokenAnswerError):
            parse(body)


@pytest.mark.parametrize("size", ["", "-1", "x", "1" * 30])
def test_an_entry_without_a_size_or_a_key_is_refused(size: str) -> None:
    for inside in (f"<Key>k</Key><Size>{size}</Size>", "<Key></Key><Size>1</Size>"):
        with pytest.raises(BrokenAnswerError):
            parse_objects(f"<ListBucketResult><Contents>{inside}</Contents></ListBucketResult>".encode())


@given(
    st.lists(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1), min_size=1, max_size=5)
)
def test_what_is_to_be_deleted_is_named_whatever_the_keys_are(keys: list[str]) -> None:
    root = ET.fromstring(delete_document(keys))  # noqa: S314 - ours
    assert [each.text for each in root.iter() if each.tag.endswith("}Key")] == keys


def test_parts_are_named_with_their_checksums_and_make_the_etag_that_servers_give() -> None:
    parts = [
        RemotePart(1, '"5d41402abc4b2a76b9719d911017c592"', ("ChecksumCRC32C", "AAAAAA==")),
        RemotePart(2, '"x"', None),
    ]
    text = complete_document(parts).decode()
    assert "<PartNumber>1</PartNumber>" in text
    assert "<ChecksumCRC32C>AAAAAA==</ChecksumCRC32C>" in text
    assert multipart_etag(parts) == ""
    assert multipart_etag(parts[:1]) == '"62109206880d38a4010a98e11243924a-1"'


def test_what_was_not_deleted_is_told_unless_it_was_not_there() -> None:
    entries = "".join(
        f"<Error><Key>{escape(key)}</Key><Code>{code}</Code></Error>"
        for key, code in (("a", "NoSuchKey"), ("b", "AccessDenied"), ("c", "InternalError"))
    )
    found = parse_not_deleted(f"<DeleteResult>{entries}</DeleteResult>".encode())
    assert found == [("b", "AccessDenied"), ("c", "InternalError")]


@pytest.mark.parametrize(("written", "meant"), [('"a"', '"a"'), ("a", '"a"'), ('W/"a"', '"a"'), ("", ""), ('""', "")])
def test_etags_are_quoted_in_one_way(written: str, meant: str) -> None:
    assert quoted(written) == meant


def test_dates_are_read_and_what_is_none_is_none() -> None:
    assert http_date_ms("Fri, 02 Jan 2026 03:04:05 GMT") == 1767323045000
    for wrong in ("", "yesterday", "99 99 99", "Fri, 02 Jan 99999 03:04:05 GMT"):
        assert http_date_ms(wrong) is None


@given(st.integers(100, 599), st.binary(max_size=60), st.text(max_size=10))
def test_any_answer_becomes_an_error_of_ours(status: int, body: bytes, retry_after: str) -> None:
    fault = fault_of_answer(status, {"retry-after": retry_after}, body)
    error = fault.error("GetObject", "key")
    assert isinstance(error, (TierUnavailableError, StoreFullError))
    assert isinstance(error, RemoteRefusedError) == (fault.kind == "refused")
    assert not (fault.is_repeatable and fault.kind in ("refused", "full"))
    assert fault.retry_after_seconds is None or 0 <= fault.retry_after_seconds <= 60


@pytest.mark.parametrize(
    ("status", "code", "kind", "is_repeatable"),
    [
        (503, "SlowDown", "busy", True),
        (429, "", "busy", True),
        (500, "InternalError", "server", True),
        (502, "", "server", True),
        (400, "BadDigest", "client", True),
        (400, "RequestTimeout", "client", True),
        (400, "XAmzContentSHA256Mismatch", "client", True),
        (409, "OperationAborted", "client", True),
        (412, "PreconditionFailed", "client", False),
        (404, "NoSuchKey", "client", False),
        (501, "NotImplemented", "server", False),
        (400, "InvalidArgument", "client", False),
    ],
)
def test_it_is_decided_what_may_be_asked_again(status: int, code: str, kind: str, *, is_repeatable: bool) -> None:
    fault = fault_of_answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())
    assert (fault.kind, fault.is_repeatable) == (kind, is_repeatable)


@pytest.mark.parametrize(
    ("endpoint", "addressing", "key", "where", "target", "host"),
    [
        ("http://h:7480", "path", "a/b c+é~", ("h", 7480), "/far/a/b%20c%2B%C3%A9~", "h:7480"),
        ("https://s3.example.com", "virtual", "a", ("far.s3.example.com", 443), "/a", "far.s3.example.com"),
        ("https://s3.example.com:443", "path", "", ("s3.example.com", 443), "/far", "s3.example.com"),
        ("http://[::1]:9000", "path", "a", ("::1", 9000), "/far/a", "[::1]:9000"),
        ("https://h", "virtual", "", ("far.h", 443), "/", "far.h"),
    ],
)
def test_requests_go_where_the_endpoint_and_its_addressing_say(
    endpoint: str, addressing: str, key: str, *, where: tuple[str, int], target: str, host: str
) -> None:
    settings = RemoteSettings(endpoint, "far", "access", "secret", addressing=addressing)  # type: ignore[arg-type]
    signer = RequestSigner(settings)
    assert (signer.host, signer.port, signer.is_tls) == (*where, endpoint.startswith("https"))
    head = signer.head(
        "GET", key, query=(("b", "x y"), ("a", "")), headers={"range": "bytes=0-1"}, payload_sha256="p", length=None
    )
    lines = head.decode().split("\r\n")
    assert lines[0] == f"GET {target}?a=&b=x%20y HTTP/1.1"
    assert f"host: {host}" in lines
    assert any(line.startswith("Authorization: AWS4-HMAC-SHA256 Credential=access/") for line in lines)
    assert "range: bytes=0-1" in lines
    assert b"secret" not in head
    assert head.endswith(b"\r\n\r\n")


def test_a_node_without_a_remote_imports_nothing_of_it() -> None:
    script = "import sys, kvobj.app.node\nprint(sorted({'botocore', 'aiobotocore', 'urllib3'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_the_extra_is_named_where_it_is_missing() -> None:
    script = """
import asyncio, logging, sys
sys.modules["botocore"] = None
sys.modules["botocore.auth"] = None
from kvobj.clock import SystemClock
from kvobj.config import RemoteSettings
from kvobj.errors import ConfigurationError
from kvobj.metrics import Metrics
from kvobj.tiers.remote.bucket import RemoteBucket
settings = RemoteSettings("http://h", "b", "a", "s")
try:
    asyncio.run(RemoteBucket.open(settings, clock=SystemClock(), metrics=Metrics(), run=None, log=logging.getLogger()))
except ConfigurationError as error:
    print(*error.problems)
"""
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert 'needs the extra "remote"' in result.stdout
    assert "kvobj[server,remote]" in result.stdout


def test_the_data_of_an_error_is_on_it() -> None:
    error: KvobjError = fault_of_answer(403, {}, b"<Error><Code>AccessDenied</Code></Error>").error("PutObject", "k")
    assert error.data["operation"] == "PutObject"
    assert error.data["code"] == "AccessDenied"
    assert "s3:" not in str(error)
