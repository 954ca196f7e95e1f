"""Renewals that are answered from their bytes: as all are answered, and never where one would be refused."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from kv_driver import FORMATS, JSON, MSGPACK, KvDriver, kv_node
from s3_driver import ALICE, BOB, FakeBody, all_headers

from kvobj.api.exchange import S3Settings
from kvobj.api.kv.hot_renewals import HotRenewals, RenewsAtOnce
from kvobj.api.message import RepeatedAnswer, Reply, RequestHead
from kvobj.api.service import S3Service
from kvobj.catalog.lease_protocol import Renewal
from kvobj.catalog.rows import UserRow
from kvobj.client import Credentials
from kvobj.client.request_head import SignedHeads
from kvobj.clock import Clock

WITHOUT_PINS = blake3(b"").digest()


@dataclass
class Times:
    """Leases' time, and the wall's, which a test can turn apart from it."""

    leases: Clock
    ahead_ms: int = 0

    def now_ms(self) -> int:
        return self.leases.now_ms() + self.ahead_ms

    def monotonic(self) -> float:
        return self.leases.monotonic()


@dataclass
class Holders:
    """A service that has the sessions in its process, and clients' requests as they come over the wire."""

    kv: KvDriver
    times: Times
    service: S3Service
    hot: HotRenewals
    count: int = 0

    def document(self, form: str = MSGPACK, **changed: object) -> bytes:
        digest: object = WITHOUT_PINS if form == MSGPACK else WITHOUT_PINS.hex()
        value = {"as_of": 0, "pins": 0, "pins_digest": digest, "release": []} | changed
        return msgspec.msgpack.encode(value) if form == MSGPACK else msgspec.json.encode(value)

    def request(
        self,
        session: str,
        body: bytes | None = None,
        *,
        form: str = MSGPACK,
        user: UserRow = ALICE,
        fields: Mapping[str, str] | None = None,
    ) -> bytes:
        """As kvobj's own client writes it."""
        body = self.document(form) if body is None else body
        heads = SignedHeads(Credentials(user.access_key, user.secret_key), host="127.0.0.1:9000", region="us-east-1")
        named = {"accept": form, "content-type": form, **(fields or {})}
        digest, second = sha256(body).hexdigest(), self.times.leases.now_ms() // 1000
        return (
            heads.head("PUT", "/cache", [("sessions", session)], named, digest, second=second, length=len(body)) + body
        )

    async def handled(self, request: bytes) -> Reply:
        """The way of all requests."""
        head, _, body = request.partition(b"\r\n\r\n")
        line, *lines = head.decode().split("\r\n")
        method, target, _ = line.split(" ")
        fields = tuple((name, value) for name, _, value in (each.partition(": ") for each in lines))
        self.count += 1
        return await self.service.handle(
            RequestHead(method, target, fields, f"R{self.count}", "127.0.0.1"), FakeBody(body)
        )

    def answered(self, request: bytes, *, waited_ms: int = 0) -> RepeatedAnswer | None:
        self.count += 1
        return self.hot.answer(request, f"R{self.count}", waited_ms=waited_ms)

    async def known(self, session: str, *, form: str = MSGPACK) -> bytes:
        """A renewal whose like has been answered before."""
        request = self.request(session, form=form)
        assert (await self.handled(request)).status == 200
        return request


class Failing:
    """A way to the sessions that has a defect of its own."""

    def renew_at_once(self, *_: object, **__: object) -> Renewal | None:
        raise RuntimeError("a defect")


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as driver:
        yield driver


def holders_of(kv: KvDriver, renews: RenewsAtOnce) -> Holders:
    times = Times(kv.clock)
    service = S3Service(
        kv.node.store,
        S3Settings(host_id="HOST"),
        clock=times,
        log=logging.getLogger("test"),
        chunks=kv.chunks,
        renews=renews,
        executor=kv.node.hash_executor,
    )
    assert service.repeated is not None
    return Holders(kv, times, service, service.repeated)


@pytest.fixture
def holders(kv: KvDriver) -> Holders:
    return holders_of(kv, kv.node.catalog.leases)


async def opened(holders: Holders, *, user: UserRow = ALICE, ttl_ms: int = 30_000) -> str:
    answer = await holders.kv.call("POST", "sessions", {"ttl_ms": ttl_ms}, user=user)
    assert answer.status == 200
    return str(answer.value["session"])


@pytest.mark.parametrize("form", FORMATS)
async def test_the_first_of_a_kind_is_the_handlers_and_those_after_it_say_the_same(holders: Holders, form: str) -> None:
    first, second = await opened(holders), await opened(holders)
    request = holders.request(first, form=form)
    assert holders.hot.looks_like(request) is not None
    assert holders.answered(request) is None
    handled = await holders.handled(request)
    for session in (first, second):
        answer = holders.answered(holders.request(session, form=form))
        assert answer is not None
        told = dict(all_headers(answer.reply))
        assert told.pop("content-length") == str(len(answer.body))
        assert told == dict(handled.headers) | {"x-amz-request-id": f"R{holders.count}"}
        assert (answer.reply.status, answer.body) == (handled.status, handled.body)
        assert answer.reply.log == handled.log
        assert (answer.method, answer.target) == ("PUT", f"/cache?sessions={session}")
        assert answer.bytes_in == len(holders.document(form))


async def test_a_holder_that_counts_wrong_is_told_to_reclaim(holders: Holders) -> None:
    session = await opened(holders)
    await holders.known(session)
    wrong = holders.document(pins_digest=bytes(32))
    answer = holders.answered(holders.request(session, wrong))
    assert answer is not None
    assert msgspec.msgpack.decode(answer.body) == {"ttl_ms": 30_000, "reclaim": True}


async def test_it_is_renewed_from_when_it_arrived(holders: Holders) -> None:
    session, other = await opened(holders, ttl_ms=10_000), await opened(holders)
    request = await holders.known(session)

    async def turn(milliseconds: int) -> None:
        holders.kv.turn(milliseconds)
        assert (await holders.handled(holders.request(other))).status == 200  # the copy of the users is fresh again

    await turn(10_100)
    assert holders.answered(request) is None
    assert holders.answered(request, waited_ms=1000) is not None  # it ends 10 s after that
    await turn(8_500)
    assert holders.answered(request) is not None
    await turn(10_100)
    assert holders.answered(request) is None
    refused = await holders.handled(request)
    assert isinstance(refused.body, bytes)
    assert b"SessionExpired" in refused.body


async def test_no_byte_of_it_may_be_another(holders: Holders) -> None:
    request = await holders.known(await opened(holders))
    assert holders.answered(request) is not None
    for place in range(len(request)):
        for other in (request[place] ^ 1, request[place] ^ 0x20, 0x0D):
            if other != request[place]:
                changed = request[:place] + bytes([other]) + request[place + 1 :]
                assert holders.answered(changed) is None, (place, changed)
        assert holders.answered(request[:place]) is None
    assert holders.answered(request + b"x") is None
    assert holders.answered(request + request) is None


@pytest.mark.parametrize(
    "field", ["x-amz-meta-a", "x-amz-expected-bucket-owner", "origin", "connection", "x-forwarded-for"]
)
async def test_who_says_more_goes_the_way_of_all(holders: Holders, field: str) -> None:
    session = await opened(holders)
    request = holders.request(session, fields={field: "alice"})
    await holders.handled(request)
    assert holders.answered(request) is None


async def test_what_releases_pins_goes_the_way_of_all(holders: Holders) -> None:
    session = await opened(holders)
    body = holders.document(release=[b"x" * 16])
    request = holders.request(session, body)
    assert (await holders.handled(request)).status == 200
    assert holders.answered(request) is None


async def test_those_that_release_pins_push_out_none_that_do_not(holders: Holders) -> None:
    session = await opened(holders)
    request = await holders.known(session)
    for count in range(1, 300):
        releases = holders.request(session, holders.document(release=[b"x" * 16] * count))
        assert (await holders.handled(releases)).status == 200
    assert holders.answered(request) is not None


async def test_long_heads_and_long_bodies_are_not_remembered(holders: Holders) -> None:
    session = await opened(holders)
    for request in (
        holders.request(session, fields={"user-agent": "u" * 2048}),
        holders.request(session, holders.document(JSON) + b" " * 256, form=JSON),
    ):
        assert (await holders.handled(request)).status == 200
        assert holders.answered(request) is None


async def test_what_looks_like_its_signature_in_another_field_does_not_take_its_place(holders: Holders) -> None:
    def with_agent(request: bytes) -> tuple[bytes, bytes]:
        """The request with its signature in front of where it counts, in a field that is not signed; and the signature."""
        signature = request.partition(b"Signature=")[2][:64]
        agent = b"\r\nuser-agent: Signature=" + signature
        return request.replace(b"\r\nauthorization: ", agent + b"\r\nauthorization: "), signature

    first, signature = with_agent(holders.request(await opened(holders)))
    assert (await holders.handled(first)).status == 200
    second, own = with_agent(holders.request(await opened(holders)))
    head, found, rest = second.rpartition(b"Signature=" + own)
    assert found
    forged = head + b"Signature=" + signature + rest
    assert holders.answered(forged) is None
    assert (await holders.handled(forged)).status == 403


async def test_sessions_of_others_and_such_as_are_none_go_the_way_of_all(holders: Holders) -> None:
    await holders.kv.declare("shared", access={"bob": "read"})
    session, other = await opened(holders), await opened(holders, user=BOB)
    await holders.known(session)
    for name in (other, "0" * 32, session.upper(), " " * 32):
        assert holders.answered(holders.request(name)) is None
    await holders.kv.call("DELETE", f"sessions={session}")
    request = holders.request(session)
    assert holders.answered(request) is None
    assert (await holders.handled(request)).status == 404


async def test_a_signature_is_good_for_a_quarter_of_an_hour(holders: Holders) -> None:
    request = await holders.known(await opened(holders))
    for seconds, is_answered in ((800, True), (1000, False), (-1000, False), (0, True)):
        holders.times.ahead_ms = seconds * 1000
        assert (holders.answered(request) is not None) is is_answered


async def test_a_user_who_is_another_by_now_goes_the_way_of_all(holders: Holders) -> None:
    session = await opened(holders)
    request = await holders.known(session)
    (user,) = [user for user in await holders.kv.node.catalog.users() if user.id == ALICE.id]
    await holders.kv.node.catalog.put_user(msgspec.structs.replace(user, secret_key="another" * 6))
    holders.kv.turn(2_000)  # the copy of the users is as old as it may be
    assert holders.answered(request) is None
    assert (await holders.handled(request)).status == 403
    assert holders.answered(request) is None


async def test_a_defect_of_the_short_way_is_told_once_and_renewals_go_the_long_way(
    kv: KvDriver, caplog: pytest.LogCaptureFixture
) -> None:
    holders = holders_of(kv, Failing())
    request = await holders.known(await opened(holders))
    assert [holders.answered(request) for _ in range(3)] == [None] * 3
    assert (await holders.handled(request)).status == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        "renewals are answered the long way"
    ]
