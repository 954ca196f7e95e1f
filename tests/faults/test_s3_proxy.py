"""The fault proxy does what it says: every toxic as a client sees it, and nothing at all where no toxic is on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_http import RawReply, RawS3
from remote_servers import RemoteStore
from s3_proxy import NOTHING, FaultProxy, Plan, proxy_thread
from server_process import wait_until
from toxics import Asked, Dice, Operation, Toxic, is_possible

BODY = bytes(range(256)) * 64
LARGE = BODY * 96


@pytest.fixture
def proxy(kvobj_remote: RemoteStore) -> Iterator[FaultProxy]:
    kvobj_remote.write("k", BODY)
    with proxy_thread(kvobj_remote.host, kvobj_remote.port) as running:
        yield running


@pytest.fixture
def raw(kvobj_remote: RemoteStore, proxy: FaultProxy) -> Iterator[RawS3]:
    with kvobj_remote.behind(proxy.port).raw(timeout_seconds=5.0) as client:
        yield client


def get(raw: RawS3, store: RemoteStore, key: str = "k", **headers: str) -> RawReply:
    return raw.request("GET", f"/{store.bucket}/{key}", headers=headers, payload=None)


def put(raw: RawS3, store: RemoteStore, key: str, body: bytes) -> RawReply:
    return raw.request("PUT", f"/{store.bucket}/{key}", body, payload=body)


def every(toxic: Toxic, **more: float) -> Plan:
    return Plan((toxic,), rate=1.0, **more)  # type: ignore[arg-type]


def test_without_a_toxic_requests_ranges_listings_and_multipart_uploads_pass_unchanged(
    kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy
) -> None:
    path = f"/{kvobj_remote.bucket}/big"
    assert get(raw, kvobj_remote).body == BODY
    part = get(raw, kvobj_remote, range="bytes=100-299")
    assert (part.status, part.body) == (206, BODY[100:300])
    begun = raw.request("POST", path, query={"uploads": ""}, payload=None).body.decode()
    upload_id = begun.partition("<UploadId>")[2].partition("</UploadId>")[0]
    pieces = (LARGE[: 5 << 20] + bytes((5 << 20) - len(LARGE)), BODY)
    tags = [
        raw.request("PUT", path, piece, query={"partNumber": str(number), "uploadId": upload_id}).headers["etag"]
        for number, piece in enumerate(pieces, 1)
    ]
    parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{tag}</ETag></Part>" for n, tag in enumerate(tags, 1))
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    assert raw.request("POST", path, body, query={"uploadId": upload_id}).status == 200
    assert get(raw, kvobj_remote, "big").body == b"".join(pieces)
    assert raw.request("DELETE", path).status == 204
    listing = raw.request("GET", f"/{kvobj_remote.bucket}", query={"list-type": "2"}, payload=None)
    assert b"<Key>k</Key>" in listing.body
    assert proxy.injections == []
    assert proxy.record()["requests"] == {
        "CompleteMultipartUpload": 1,
        "CreateMultipartUpload": 1,
        "DeleteObject": 1,
        "GetObject": 3,
        "ListObjectsV2": 1,
        "UploadPart": 2,
        "connect": 1,
    }


@pytest.mark.parametrize(
    ("toxic", "status", "code"),
    [
        (Toxic.UNAVAILABLE, 503, "ServiceUnavailable"),
        (Toxic.UNAVAILABLE_BARE, 503, ""),
        (Toxic.SLOW_DOWN, 503, "SlowDown"),
        (Toxic.CONFLICT, 409, "OperationAborted"),
        (Toxic.PRECONDITION, 412, "PreconditionFailed"),
        (Toxic.SKEWED, 403, "RequestTimeTooSkewed"),
    ],
)
def test_an_answer_of_the_proxys_own_leaves_the_server_untouched(
    kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy, toxic: Toxic, *, status: int, code: str
) -> None:
    proxy.plan = every(toxic)
    reply = put(raw, kvobj_remote, "new", LARGE)
    assert (reply.status, reply.code) == (status, code)
    assert ("retry-after" in reply.headers) == (toxic is Toxic.SLOW_DOWN)
    assert get(raw, kvobj_remote).status == status
    proxy.plan = NOTHING
    assert get(raw, kvobj_remote).body == BODY
    assert kvobj_remote.read("new") is None
    assert [injection.operation for injection in proxy.injections] == [Operation.PUT, Operation.GET]
    assert {injection.toxic for injection in proxy.injections} == {toxic}


@pytest.mark.parametrize("toxic", [Toxic.TRUNCATED, Toxic.RESET_BODY, Toxic.HALF_HEAD, Toxic.LOST_REPLY])
def test_a_reply_that_breaks_off_is_seen_as_a_broken_connection_and_the_next_request_passes(
    kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy, toxic: Toxic
) -> None:
    kvobj_remote.write("large", LARGE)
    proxy.plan = every(toxic)
    for key in ("k", "large"):
        with pytest.raises(ConnectionError):
            get(raw, kvobj_remote, key)
    proxy.plan = NOTHING
    assert get(raw, kvobj_remote, "large").body == LARGE


@pytest.mark.parametrize(
    ("toxic", "is_done"),
    [(Toxic.LOST_REPLY, True), (Toxic.HALF_HEAD, True), (Toxic.TRUNCATED, True), (Toxic.RESET_BODY, False)],
)
def test_a_write_whose_reply_is_lost_was_done_and_one_reset_in_mid_body_was_not(
    kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy, toxic: Toxic, *, is_done: bool
) -> None:
    proxy.plan = every(toxic)
    with pytest.raises(ConnectionError):
        put(raw, kvobj_remote, "new", LARGE)
    proxy.plan = NOTHING
    assert kvobj_remote.read("new") == (LARGE if is_done else None)


def test_one_bit_of_a_get_is_turned(kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy) -> None:
    proxy.plan = every(Toxic.WRONG_BYTE_DOWN)
    body = get(raw, kvobj_remote).body
    different = [(ours, theirs) for ours, theirs in zip(BODY, body, strict=True) if ours != theirs]
    assert len(different) == 1
    assert different[0][0] ^ different[0][1] == 1
    assert put(raw, kvobj_remote, "new", BODY).status == 200
    assert kvobj_remote.read("k") == BODY


def test_one_bit_of_a_put_is_turned_and_a_server_that_was_told_a_digest_refuses_it(
    kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy
) -> None:
    proxy.plan = every(Toxic.WRONG_BYTE_UP)
    assert put(raw, kvobj_remote, "new", LARGE).status == 400
    assert raw.request("PUT", f"/{kvobj_remote.bucket}/unsigned", LARGE).status == 200
    stored = kvobj_remote.read("unsigned")
    assert stored is not None
    assert sum(ours != theirs for ours, theirs in zip(LARGE, stored, strict=True)) == 1
    assert get(raw, kvobj_remote).body == BODY


@pytest.mark.parametrize("toxic", [Toxic.STALL_HEAD, Toxic.STALL_BODY])
def test_a_stall_ends_and_what_follows_is_right(
    kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy, toxic: Toxic
) -> None:
    proxy.plan = every(toxic, stall_seconds=0.2)
    began = time.monotonic()
    assert get(raw, kvobj_remote).body == BODY
    assert put(raw, kvobj_remote, "new", LARGE).status == 200
    assert time.monotonic() - began >= 0.4
    assert kvobj_remote.read("new") == LARGE


def test_a_trickle_is_slow_and_right(kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy) -> None:
    proxy.plan = every(Toxic.TRICKLE, trickle_bytes_per_second=len(BODY) * 5)
    began = time.monotonic()
    assert get(raw, kvobj_remote).body == BODY
    assert time.monotonic() - began >= 0.15


def test_after_an_outage_somebody_listens_again(kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy) -> None:
    with kvobj_remote.behind(proxy.port).raw() as kept:
        assert get(kept, kvobj_remote).status == 200
        proxy.plan = every(Toxic.REFUSED, outage_seconds=0.5)
        with pytest.raises(ConnectionError):
            get(raw, kvobj_remote)
        proxy.plan = NOTHING
        with pytest.raises(ConnectionError):
            get(kept, kvobj_remote)  # its connection is reset with the others
        wait_until(lambda: not is_refused(raw), timeout_seconds=10, what="the end of the outage")
        assert get(raw, kvobj_remote).body == BODY
    [(start, stop)] = proxy.outages
    assert start < time.monotonic()
    assert stop - start == pytest.approx(0.5)


def is_refused(raw: RawS3) -> bool:
    try:
        raw.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_a_connection_closed_at_accept_never_reaches_the_server_and_each_carries_one_request(
    kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy
) -> None:
    proxy.plan = every(Toxic.CLOSED_AT_ACCEPT)
    with pytest.raises(ConnectionError):
        get(raw, kvobj_remote)
    assert proxy.requests == Counter({Operation.CONNECT: 1})
    proxy.plan = Plan((Toxic.CLOSED_AT_ACCEPT,), rate=1e-9)
    assert get(raw, kvobj_remote).headers["connection"] == "close"


def test_the_servers_clock_can_be_set(kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy) -> None:
    proxy.plan = Plan(clock_ahead_seconds=86400.0 * 366 * 2)
    reply = get(raw, kvobj_remote)
    assert reply.body == BODY
    assert int(reply.headers["date"].split()[3]) >= time.gmtime().tm_year + 2


def test_only_the_operations_asked_for_are_hit(kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy) -> None:
    proxy.plan = Plan((Toxic.UNAVAILABLE,), rate=1.0, operations=frozenset({Operation.PUT}))
    assert get(raw, kvobj_remote).status == 200
    assert put(raw, kvobj_remote, "new", b"x").status == 503


def test_what_the_client_stops_sending_never_reaches_the_server(
    kvobj_remote: RemoteStore, raw: RawS3, proxy: FaultProxy
) -> None:
    head = raw.head("PUT", f"/{kvobj_remote.bucket}/half", headers={"content-length": str(len(LARGE))}).head
    with raw.connect() as connection:
        connection.send(head + LARGE[: len(LARGE) // 2])
    wait_until(lambda: proxy.requests[Operation.PUT] == 1, timeout_seconds=10, what="the request")
    assert kvobj_remote.read("half") is None


@given(st.integers(0, 2**32), st.sampled_from(Toxic), st.floats(0.05, 0.95))
def test_the_same_requests_meet_the_same_faults_in_any_order_and_about_as_many_as_asked_for(
    seed: int, toxic: Toxic, rate: float
) -> None:
    plan = Plan((toxic,), rate=rate, seed=seed)
    operation = next(operation for operation in Operation if is_possible(toxic, operation))
    asked = [Asked(operation, f"key-{number}") for number in range(200)]
    forwards, backwards = Dice(), Dice()
    first = {one: forwards.throw(plan, one) for one in asked}
    second = {one: backwards.throw(plan, one) for one in reversed(asked)}
    assert first == second
    hits = sum(hit is not None for hit in first.values())
    assert abs(hits - 200 * rate) < 60  # eight standard deviations and more
    again = [forwards.throw(plan, one) for one in asked]
    assert again != list(first.values())  # a repeat is decided on its own


@pytest.mark.parametrize(
    ("method", "target", "asked"),
    [
        ("GET", "/b/a%20b?x-id=GetObject", Asked(Operation.GET, "a b", "x-id=GetObject")),
        ("PUT", "/b/k?partNumber=2&uploadId=xyz", Asked(Operation.PUT_PART, "k", "partNumber=2")),
        ("POST", "/b/k?uploadId=xyz", Asked(Operation.COMPLETE, "k")),
        ("POST", "/b?delete", Asked(Operation.DELETE_MANY, "", "delete=")),
        ("GET", "/b/?uploads&prefix=p", Asked(Operation.LIST_UPLOADS, "", "prefix=p&uploads=")),
        ("GET", "/", Asked(Operation.OTHER, "")),
        ("PUT", "/b/k?X-Amz-Signature=00", Asked(Operation.PUT, "k")),
    ],
)
def test_requests_are_named_as_s3_names_them_without_what_the_server_made_up(
    method: str, target: str, asked: Asked
) -> None:
    assert Asked.parse(method, target) == asked
