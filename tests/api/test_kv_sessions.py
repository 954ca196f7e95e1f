"""?sessions and ?pins: opened, renewed with the digest of what is held, released, closed; never another's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from blake3 import blake3
from kv_driver import FORMATS, JSON, MSGPACK, KvDriver, ids_in, kv_node, plain
from s3_driver import BOB

TOKENS = list(range(16 * 4))


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as driver:
        yield driver


def digest_of(form: str, pins: list[object]) -> object:
    raw = sorted(pin if isinstance(pin, bytes) else bytes.fromhex(str(pin)) for pin in pins)
    digest = blake3(b"".join(raw)).digest()
    return digest if form == MSGPACK else digest.hex()


@pytest.mark.parametrize("form", FORMATS)
async def test_a_session_is_opened_renewed_and_closed(kv: KvDriver, form: str) -> None:
    opened = await kv.call("POST", "sessions", {"holder": "decode-3", "ttl_ms": 9000}, form=form)
    assert opened.status == 200
    assert (opened.value["ttl_ms"], opened.value["renew_ms"]) == (9000, 3000)
    assert opened.value["epoch"] >= 1
    session = opened.value["session"]
    assert len(session) == (16 if form == MSGPACK else 32)
    name = plain(session)
    renewed = await kv.call(
        "PUT", f"sessions={name}", {"as_of": 0, "pins": 0, "pins_digest": digest_of(form, [])}, form=form
    )
    assert renewed.value == {"ttl_ms": 9000, "reclaim": False}
    # Who holds nothing need not say so.
    assert (await kv.call("PUT", f"sessions={name}", {}, form=form)).value == renewed.value
    assert (await kv.call("DELETE", f"sessions={name}")).status == 204
    assert (await kv.call("PUT", f"sessions={name}", {})).code == "NoSuchSession"


async def test_a_ttl_is_cut_to_the_stores_bounds(kv: KvDriver) -> None:
    assert (await kv.call("POST", "sessions", {"ttl_ms": 1})).value["ttl_ms"] == 1000
    assert (await kv.call("POST", "sessions", {"ttl_ms": 2**30})).value["ttl_ms"] == 600_000
    assert (await kv.call("POST", "sessions", {})).value["ttl_ms"] == 30_000


@pytest.mark.parametrize("form", FORMATS)
async def test_pins_are_added_counted_and_released(kv: KvDriver, form: str) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:3])
    session = await kv.open_session(form=form)
    name = plain(session)
    tails = ids_in(form, [ids[2], ids[3], ids[0]])
    added = await kv.call("POST", "pins", {"session": session, "namespace": "llama", "tails": tails}, form=form)
    assert [each["live"] for each in added.value["pins"]] == [True, False, True]
    told = [ids[2], ids[3], ids[0]]
    assert [each["tail"] for each in added.value["pins"]] == [each if form == MSGPACK else each.hex() for each in told]
    assert 0 < added.value["deadline_ms"] <= 30_000
    pins = [each["pin"] for each in added.value["pins"] if each["live"]]
    assert added.value["pins"][1]["pin"] is None
    grant = added.value["grant"]

    async def renew(held: list[object], release: list[object], *, as_of: int = grant) -> bool:
        value = {"as_of": as_of, "pins": len(held), "pins_digest": digest_of(form, held), "release": release}
        answer = await kv.call("PUT", f"sessions={name}", value, form=form)
        assert answer.status == 200, answer.value
        reclaim: bool = answer.value["reclaim"]
        return reclaim

    assert not await renew(pins, [])
    assert await renew(pins[:1], [])
    assert not await renew(pins[:1], pins[1:])
    assert kv.node.catalog.leases.usage().pins == 1
    released = await kv.call("POST", "pins", {"session": session, "release": pins[:1]}, form=form)
    assert released.value["pins"] == []
    assert kv.node.catalog.leases.usage().pins == 0
    assert not await renew([], [])


async def test_a_grant_that_the_holder_has_not_seen_is_no_mismatch(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS[:16])
    await kv.put_chain(namespace, ids)
    session = await kv.open_session()
    first = await kv.match("llama", ids=[ids[0].hex()], session=session, pin=True)
    await kv.match("llama", ids=[ids[0].hex()], session=session, pin=True)
    value = {"as_of": first.value["grant"], "pins": 1, "pins_digest": digest_of(JSON, [first.value["pin"]])}
    assert (await kv.call("PUT", f"sessions={session}", value)).value["reclaim"] is False
    assert (await kv.call("PUT", f"sessions={session}", {**value, "as_of": value["as_of"] + 1})).value[
        "reclaim"
    ] is True


async def test_pins_by_s3_key_need_no_namespace(kv: KvDriver) -> None:
    await kv.declare("engine", ids="foreign", layout={"kind": "opaque"})
    assert (await kv.put("engine/a", b"x", namespace="engine")).status == 200
    session = await kv.open_session()
    answer = await kv.call("POST", "pins", {"session": session, "tails": ["engine/a", "engine/b"]})
    assert [(each["tail"], each["live"]) for each in answer.value["pins"]] == [("engine/a", True), ("engine/b", False)]
    named = await kv.call("POST", "pins", {"session": session, "namespace": "engine", "tails": ["a"]})
    assert named.value["pins"][0]["live"]


async def test_a_foreign_session_does_not_exist(kv: KvDriver) -> None:
    namespace = await kv.declare("llama", access={"bob": "read"})
    ids = namespace.ids(TOKENS[:16])
    await kv.put_chain(namespace, ids)
    session = await kv.open_session()
    pinned = await kv.match("llama", ids=[ids[0].hex()], session=session, pin=True)
    assert (await kv.driver.request("PUT", "/second", headers={"x-kvobj-bucket-kind": "kv"})).status == 200
    match = {"namespace": "llama", "ids": [ids[0].hex()], "session": session, "pin": True}
    for answer in (
        await kv.call("PUT", f"sessions={session}", {}, user=BOB),
        await kv.call("DELETE", f"sessions={session}", user=BOB),
        await kv.call("POST", "pins", {"session": session, "release": [pinned.value["pin"]]}, user=BOB),
        await kv.call("POST", "match", match, user=BOB),
        await kv.call("PUT", f"sessions={session}", {}, bucket="second"),
        await kv.call("POST", "pins", {"session": session, "tails": []}, bucket="second"),
    ):
        assert (answer.status, answer.code) == (404, "NoSuchSession")
    assert kv.node.catalog.leases.usage().pins == 1
    assert (await kv.call("PUT", f"sessions={session}", {})).status == 200


async def test_an_expired_sessions_pins_are_gone_and_using_it_is_told(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS[:16])
    await kv.put_chain(namespace, ids)
    session = await kv.open_session(ttl_ms=1000)
    found = await kv.match("llama", ids=[ids[0].hex()], session=session, pin=True)
    kv.turn(1001)
    match = {"namespace": "llama", "ids": [ids[0].hex()], "session": session, "pin": True}
    for answer in (
        await kv.call("PUT", f"sessions={session}", {}),
        await kv.call("POST", "match", match),
        await kv.call("POST", "pins", {"session": session, "tails": [ids[0].hex()]}),
    ):
        assert (answer.status, answer.code) == (409, "SessionExpired")
    assert kv.node.catalog.leases.usage().pins == 1
    kv.turn(500)
    assert await kv.node.catalog.leases.expire(now_boot_ms=kv.now_boot_ms()) == 1
    assert kv.node.catalog.leases.usage().pins == 0
    assert (await kv.call("PUT", f"sessions={session}", {})).code == "NoSuchSession"
    # The chunk is live, so its old pin reads nothing that a plain GET would not; of a hidden one it is none any more.
    assert (await kv.driver.request("DELETE", f"/cache/{ids[0].hex()}")).status == 204
    assert (await kv.driver.get(f"/cache/{ids[0].hex()}", x_kvobj_pin=found.value["pin"])).status == 404


async def test_more_pins_than_a_session_may_hold_are_refused_and_none_is_added(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS[:16])
    await kv.put_chain(namespace, ids)
    session = await kv.open_session(form=MSGPACK)
    many = await kv.call(
        "POST", "pins", {"session": session, "namespace": "llama", "tails": ids[0] * 4097}, form=MSGPACK
    )
    assert (many.status, many.code) in ((403, "PinLimitExceeded"), (400, "BatchTooLarge"))
    assert kv.node.catalog.leases.usage().pins == 0
    full = await kv.call(
        "POST", "pins", {"session": session, "namespace": "llama", "tails": ids[0] * 4096}, form=MSGPACK
    )
    assert full.status == 200
    match = {"namespace": "llama", "ids": ids[0], "session": session, "pin": True}
    assert (await kv.call("POST", "match", match, form=MSGPACK)).code == "PinLimitExceeded"
    assert kv.node.catalog.leases.usage().pins == 4096


async def test_wrong_requests_about_sessions_are_typed_errors(kv: KvDriver) -> None:
    session = await kv.open_session()
    for method, query, value, code in (
        ("POST", "sessions", {"ttl_ms": 0}, "InvalidRequest"),
        ("POST", "sessions", {"ttl_ms": "30s"}, "InvalidRequest"),
        ("POST", "sessions", {"holder": "x" * 257}, "InvalidRequest"),
        ("POST", "sessions", {"colour": 1}, "InvalidRequest"),
        ("PUT", f"sessions={session}", {"pins": -1}, "InvalidRequest"),
        ("PUT", f"sessions={session}", {"pins_digest": "zz"}, "InvalidRequest"),
        ("PUT", f"sessions={session}", {"pins_digest": "00"}, "InvalidRequest"),
        ("PUT", f"sessions={'0' * 32}", {}, "NoSuchSession"),
        ("PUT", "sessions=nothing", {}, "NoSuchSession"),
        ("DELETE", f"sessions={'0' * 32}", None, "NoSuchSession"),
        ("POST", "pins", {"tails": []}, "InvalidRequest"),
        ("POST", "pins", {"session": session, "tails": [""]}, "InvalidChunkId"),
        ("POST", "pins", {"session": session, "tails": ["x"] * 65_537}, "BatchTooLarge"),
        ("POST", "pins", {"session": session, "release": ["00" * 16] * 65_537}, "BatchTooLarge"),
        ("POST", "pins", {"session": session, "namespace": "absent", "tails": []}, "NoSuchNamespace"),
    ):
        answer = await kv.call(method, query, value)
        assert answer.code == code, (method, query, value)
    assert kv.node.catalog.leases.usage().sessions == 1
    assert (await kv.call("PUT", f"sessions={session}", {"release": ["not a pin", "00" * 16]})).status == 200


async def test_who_is_granted_nothing_opens_no_session(kv: KvDriver) -> None:
    assert (await kv.call("POST", "sessions", {}, user=BOB)).code == "AccessDenied"
    await kv.declare("llama", access={"bob": "read"})
    assert (await kv.call("POST", "sessions", {}, user=BOB)).status == 200


async def test_tails_of_a_namespace_that_one_may_not_use_are_not_live(kv: KvDriver) -> None:
    mine = await kv.declare("mine")
    shared = await kv.declare("shared", access={"bob": "read"})
    for namespace in (mine, shared):
        await kv.put_chain(namespace, namespace.ids(TOKENS[:16]))
    session = await kv.open_session(user=BOB)
    tails = [mine.ids(TOKENS[:16])[0].hex(), shared.ids(TOKENS[:16])[0].hex(), "absent"]
    answer = await kv.call("POST", "pins", {"session": session, "tails": tails}, user=BOB)
    assert [each["tail"] for each in answer.value["pins"]] == tails
    assert [each["live"] for each in answer.value["pins"]] == [False, True, False]
