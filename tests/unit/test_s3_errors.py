from xml.etree import ElementTree as ET

import pytest

from kvobj import errors as kinds
from kvobj.api.errors import S3Error, describe, error_reply, refusal_reply
from kvobj.api.message import HttpFault, Refusal
from kvobj.errors import KvobjError


def leaves(kind: type[KvobjError]) -> list[type[KvobjError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]


@pytest.mark.parametrize(
    "kind",
    [kind for kind in leaves(KvobjError) if kind.__module__ == "kvobj.errors" and kind is not kinds.ConfigurationError],
)
def test_every_error_has_a_code_and_a_status(kind: type[KvobjError]) -> None:
    code, status, message = describe(kind("what happened", reason="why", secret="s3cr3t"))
    assert code
    assert 400 <= status < 600
    assert message
    assert "s3cr3t" not in message


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (kinds.NoSuchKeyError("x"), "NoSuchKey", 404),
        (kinds.InvalidRangeError("x"), "InvalidRange", 416),
        (kinds.PreconditionFailedError("x"), "PreconditionFailed", 412),
        (kinds.ImmutableChunkError("x"), "ImmutableChunk", 409),
        (kinds.NoSuchNamespaceError("x"), "NoSuchNamespace", 404),
        (kinds.NamespaceConflictError("x"), "NamespaceConflict", 409),
        (kinds.ParentNotFoundError("x"), "ParentNotFound", 409),
        (kinds.LayoutMismatchError("x"), "LayoutMismatch", 409),
        (kinds.NoSuchSessionError("x"), "NoSuchSession", 404),
        (kinds.SessionExpiredError("x"), "SessionExpired", 409),
        (kinds.PinLimitExceededError("x"), "PinLimitExceeded", 403),
        (kinds.QuotaExceededError("x"), "QuotaExceeded", 403),
        (kinds.BatchTooLargeError("x"), "BatchTooLarge", 400),
        (kinds.InvalidChunkIdError("x"), "InvalidChunkId", 400),
        (kinds.InvalidTokensError("x"), "InvalidTokens", 400),
        (kinds.BusyError("x"), "SlowDown", 503),
        (kinds.StoreFullError("x"), "StoreFull", 507),
        (kinds.TierUnavailableError("x"), "ServiceUnavailable", 503),
        (kinds.FrameCorruptError("x"), "InternalError", 500),
        (kinds.DigestMismatchError("x"), "BadDigest", 400),
        (kinds.IncompleteBodyError("x"), "IncompleteBody", 400),
        (S3Error("MalformedXML"), "MalformedXML", 400),
    ],
)
def test_an_error_has_the_code_that_s3_gives_it(error: KvobjError, code: str, status: int) -> None:
    assert describe(error)[:2] == (code, status)


def test_a_failed_condition_is_told_in_the_words_that_s3fs_looks_for() -> None:
    assert "pre-conditions" in describe(kinds.PreconditionFailedError("not so"))[2]


def test_a_reply_tells_the_request_id_in_header_and_body() -> None:
    error = kinds.NoSuchKeyError("no such key", bucket="b", key="a<b\x01")
    reply = error_reply(error, request_id="ID1", host_id="host", resource="/b/a<b", is_head=False, close=True)
    assert dict(reply.headers)["x-amz-request-id"] == "ID1"
    assert isinstance(reply.body, bytes)
    assert b"<RequestId>ID1</RequestId>" in reply.body
    assert b"<Key>a&lt;b&#x1;</Key>" in reply.body
    assert reply.close


def test_a_refused_chunk_is_told_what_is_missing_or_differs() -> None:
    def body(error: KvobjError) -> bytes:
        reply = error_reply(error, request_id="I", host_id="h", resource="/b/k", is_head=False, close=False)
        assert isinstance(reply.body, bytes)
        return reply.body

    assert b"<Parent>a&lt;b</Parent>" in body(kinds.ParentNotFoundError("x", parent="a<b", key="k"))
    mismatch = body(kinds.LayoutMismatchError("what is wrong", differs=("part", "tokens")))
    assert b"<Differs>part,tokens</Differs>" in mismatch
    assert b"<Message>what is wrong</Message>" in mismatch


def test_a_head_has_no_body_and_a_busy_store_says_when_to_come_back() -> None:
    reply = error_reply(kinds.BusyError("x"), request_id="I", host_id="h", resource="/", is_head=True, close=False)
    assert reply.body == b""
    assert dict(reply.headers)["retry-after"] == "1"


@pytest.mark.parametrize("fault", list(HttpFault))
def test_what_the_http_layer_answers_by_itself_is_xml_too(fault: HttpFault) -> None:
    reply = refusal_reply(Refusal(fault, "a <detail>", "ID2", "PUT", "/b/k?X-Amz-Signature=1"), host_id="host")
    assert isinstance(reply.body, bytes)
    root = ET.fromstring(reply.body)  # noqa: S314 - our own output
    headers = dict(reply.headers)
    assert reply.status == fault.status
    assert (root.findtext("RequestId"), headers["x-amz-request-id"]) == ("ID2", "ID2")
    assert (root.findtext("HostId"), headers["x-amz-id-2"]) == ("host", "host")
    assert root.findtext("Code") == reply.log["error"]
    assert root.findtext("Resource") == "/b/k"


def test_a_refused_head_request_gets_no_body() -> None:
    assert refusal_reply(Refusal(HttpFault.BUSY, "", "ID2", "HEAD", "/"), host_id="host").body == b""
