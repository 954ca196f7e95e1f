import pytest

from kvobj import errors as kinds
from kvobj.api.errors import S3Error, bad_request, describe, error_reply
from kvobj.errors import KvobjError


def leaves(kind: type[KvobjError]) -> list[type[KvobjError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in leaves(child))]


@pytest.mark.parametrize(
    "kind",
    [kind for kind in leaves(KvobjError) if kind.__module__ == "kvobj.errors" and kind is not kinds.ConfigurationError],
)
def test_every_error_has_a_code_and_a_status(kind: type[KvobjError]) -> None:
    code, status, message = describe(kind("what happened", secret="s3cr3t"))
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


def test_what_the_http_layer_refuses_is_xml_too() -> None:
    reply = bad_request(431, "RequestHeaderSectionTooLarge", "Too long.", "ID2")
    assert isinstance(reply.body, bytes)
    assert b"<Code>RequestHeaderSectionTooLarge</Code>" in reply.body
    assert reply.close
