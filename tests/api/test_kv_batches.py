"""?mget and ?mput: many chunks in one stream, whole or by layers in one, all or nothing in the other."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from kv_driver import (
    CHUNK_BYTES,
    FORMATS,
    JSON,
    LAYERS,
    MSGPACK,
    KvDriver,
    chain_stream,
    framed,
    ids_in,
    kv_node,
    parse_stream,
    payload,
    rows,
    stream,
    tokens_in,
)
from s3_driver import ALICE, BOB, FakeBody, seed_of, sign, signed_chunks, unsigned_chunks

from kvobj.api.message import BodyStream, RequestHead
from kvobj.app.node import flush
from kvobj.catalog.rows import Durability
from kvobj.ids import BlobId

TOKENS = list(range(16 * 5))
LAYER_BYTES = CHUNK_BYTES // LAYERS


@pytest.fixture
async def kv(tmp_path: Path, shm_path: Path) -> AsyncIterator[KvDriver]:
    async with kv_node(tmp_path, shm_path) as driver:
        yield driver


async def nothing_is_left(kv: KvDriver) -> bool:
    """No row, no blob, nothing reserved: as before the first PUT."""
    dirty = kv.node.dram.dirty_bytes
    return not await rows(kv) and not dirty and not len(kv.node.in_use) and not [x async for x in kv.node.dram.scan()]


# -- mget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
async def test_mget_streams_the_chunks_in_order_and_misses_among_them(kv: KvDriver, form: str) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:3])
    asked = [ids[2], ids[4], ids[0], ids[0]]
    _, items = await kv.mget({"ids": ids_in(form, asked)}, form=form)
    assert [(item.header["i"], item.header["status"]) for item in items] == [(0, 200), (1, 404), (2, 200), (3, 200)]
    assert [item.payload for item in items] == [payload(ids[2]), b"", payload(ids[0]), payload(ids[0])]
    for item, chunk_id in zip(items, asked, strict=True):
        if item.header["status"] == 200:
            assert item.header["digest"] in (None, blake3(payload(chunk_id)).digest())
            assert (item.header["codec"], item.header["layer"]) == ("raw", None)


async def test_mget_of_nothing_is_an_end(kv: KvDriver) -> None:
    assert (await kv.mget({"ids": []}))[1] == []


async def test_mget_sends_chunks_of_every_size_whole(kv: KvDriver) -> None:
    sizes = [0, 1, 5000, 16 * 1024, 16 * 1024 + 1, 70_000, 300_000, 3 << 20, 2, 0]
    for index, size_bytes in enumerate(sizes):
        data = payload(b"%d" % index, size_bytes)
        assert (await kv.put(f"k{index}", data)).status == 200
    _, items = await kv.mget({"namespace": "default", "ids": [f"k{index}" for index in range(len(sizes))]})
    assert [item.payload for item in items] == [payload(b"%d" % index, size) for index, size in enumerate(sizes)]


async def test_mget_reads_what_lies_in_the_home_tier_alone(kv: KvDriver) -> None:
    datas = {f"k{index}": payload(b"%d" % index, 400_000) for index in range(6)}
    for key, data in datas.items():
        assert (await kv.put(key, data, durability="local")).status == 200
    for blob_id in [blob_id async for blob_id in kv.node.dram.scan()]:
        await kv.node.dram.delete([blob_id])
    _, items = await kv.mget({"ids": list(datas)})
    assert [item.payload for item in items] == list(datas.values())


async def test_a_chunk_whose_bytes_are_lost_is_a_miss_among_the_others(kv: KvDriver) -> None:
    for key in ("a", "b", "c"):
        assert (await kv.put(key, payload(key.encode()), durability="local")).status == 200
    (lost,) = [row for row in await rows(kv) if row.key == "b"]
    await kv.node.read_tier.delete([BlobId(lost.blobs[0].blob_id)])
    _, items = await kv.mget({"ids": ["a", "b", "c"]})
    assert [item.header["status"] for item in items] == [200, 404, 200]
    assert [row.key for row in await rows(kv)] == ["a", "c"]


async def test_mget_by_layers_in_either_order(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS[:24])
    await kv.put_chain(namespace, ids, last_tokens=8)
    named = [each.hex() for each in ids]
    sizes = [CHUNK_BYTES, CHUNK_BYTES // 2]

    def layer(index: int, number: int) -> bytes:
        size = sizes[index] // LAYERS
        return payload(ids[index], sizes[index])[number * size : (number + 1) * size]

    _, by_chunk = await kv.mget({"ids": named, "layers": [1, 2]})
    assert [(item.header["i"], item.header["layer"]) for item in by_chunk] == [(0, None), (1, None)]
    assert [item.payload for item in by_chunk] == [layer(0, 1) + layer(0, 2), layer(1, 1) + layer(1, 2)]
    assert all(item.header["digest"] is None for item in by_chunk)
    _, by_layer = await kv.mget({"ids": named, "layers": [1, 2], "order": "layer"})
    assert [(item.header["layer"], item.header["i"]) for item in by_layer] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [item.payload for item in by_layer] == [layer(0, 1), layer(1, 1), layer(0, 2), layer(1, 2)]
    _, all_layers = await kv.mget({"ids": [*named, "0" * 64], "order": "layer"})
    assert [item.header["layer"] for item in all_layers] == [layer for layer in range(LAYERS) for _ in range(3)]
    assert [item.header["status"] for item in all_layers] == [200, 200, 404] * LAYERS


async def test_mget_by_layers_of_chunks_that_have_as_many_and_of_others_is_refused_and_nothing_is_cut_off(
    kv: KvDriver,
) -> None:
    layout = {"kind": "kv", "dtype": "bf16", "head_dim": 8}
    named = []
    for name, layers in (("two", LAYERS // 2), ("four", LAYERS), ("alike", LAYERS)):
        # As many bytes: half the layers have twice the heads.
        namespace = await kv.declare(name, layout={**layout, "layers": layers, "kv_heads": LAYERS // layers})
        ids = namespace.ids(TOKENS[:16])
        await kv.put_chain(namespace, ids)
        named.append(ids[0].hex())
    absent = "0" * 64
    for asked in (named, [*named[:2], absent], [absent, *reversed(named)]):
        answer = await kv.call("POST", "mget", {"ids": asked, "order": "layer"})
        assert (answer.status, answer.code) == (400, "InvalidRequest")
        assert "2 and 4 layers" in answer.value["error"]["message"]
    assert not len(kv.node.in_use)
    _, alone = await kv.mget({"ids": [named[1], absent, named[2]], "order": "layer"})
    assert [(item.header["layer"], item.header["status"]) for item in alone] == [
        (layer, status) for layer in range(4) for status in (200, 404, 200)
    ]
    _, misses = await kv.mget({"namespace": "two", "ids": named, "order": "layer"})
    assert [item.header["status"] for item in misses] == [200, 404, 404] * 2
    _, whole = await kv.mget({"ids": named})
    assert [item.header["status"] for item in whole] == [200] * 3
    _, common = await kv.mget({"ids": named[:2], "order": "layer", "layers": [0, 1]})
    assert [(item.header["layer"], item.header["i"]) for item in common] == [(0, 0), (0, 1), (1, 0), (1, 1)]


async def test_mget_pins_the_run_and_says_so_in_its_headers(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:2])
    session = await kv.open_session()
    asked = {"namespace": "llama", "ids": [each.hex() for each in ids], "session": session, "pin": True}
    answer, items = await kv.mget(asked)
    assert answer.headers["x-kvobj-matched"] == "2"
    assert len(answer.headers["x-kvobj-pin"]) == 32
    assert [item.header["status"] for item in items] == [200, 200, 404, 404, 404]
    assert kv.node.catalog.leases.usage().pins == 1


async def test_wrong_mgets_are_typed_errors(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    await kv.declare("opaque", ids="foreign", layout={"kind": "opaque"})
    ids = namespace.ids(TOKENS[:16])
    await kv.put_chain(namespace, ids)
    assert (await kv.put("opaque/a", b"x", namespace="opaque")).status == 200
    named = ids[0].hex()
    for value, code in (
        ({"ids": [""]}, "InvalidChunkId"),
        ({"ids": [1]}, "InvalidChunkId"),
        ({"ids": ["00"], "namespace": "llama"}, "InvalidChunkId"),
        ({"ids": ["0" * 64] * 65_537}, "BatchTooLarge"),
        ({"ids": [named], "layers": [2, 1]}, "InvalidRequest"),
        ({"ids": [named], "layers": [0, 4]}, "InvalidRequest"),
        ({"ids": [named], "layers": [0]}, "InvalidRequest"),
        ({"ids": ["opaque/a"], "layers": [0, 0]}, "InvalidRequest"),
        ({"ids": ["opaque/a"], "order": "layer"}, "InvalidRequest"),
        ({"ids": [named], "order": "size"}, "InvalidRequest"),
        ({"ids": [named], "accept": ["x3"], "order": "layer"}, "InvalidRequest"),
        ({"ids": [named], "accept": ["x3;level=9"]}, "InvalidRequest"),
        ({"ids": [named], "pin": True}, "InvalidRequest"),
        ({"ids": [named], "pin": True, "session": "0" * 32, "namespace": "llama"}, "NoSuchSession"),
        ({"ids": [named], "namespace": "absent"}, "NoSuchNamespace"),
    ):
        answer = await kv.call("POST", "mget", value)
        assert answer.code == code, value
    assert not len(kv.node.in_use)


async def test_mget_of_another_users_chunks_finds_none_of_them(kv: KvDriver) -> None:
    mine, shared = await kv.declare("mine"), await kv.declare("shared", access={"bob": "read"})
    for namespace in (mine, shared):
        await kv.put_chain(namespace, namespace.ids(TOKENS[:16]))
    asked = [namespace.ids(TOKENS[:16])[0].hex() for namespace in (mine, shared)]
    _, items = await kv.mget({"ids": asked}, user=BOB)
    assert [item.header["status"] for item in items] == [404, 200]


async def test_mget_in_a_namespace_finds_only_its_own(kv: KvDriver) -> None:
    one, other = await kv.declare("one"), await kv.declare("other")
    for namespace in (one, other):
        await kv.put_chain(namespace, namespace.ids(TOKENS[:16]))
    asked = [namespace.ids(TOKENS[:16])[0].hex() for namespace in (one, other)]
    _, items = await kv.mget({"namespace": "one", "ids": asked})
    assert [item.header["status"] for item in items] == [200, 404]


async def test_chunks_on_their_way_are_not_reaped_and_are_let_go_when_the_reader_leaves(kv: KvDriver) -> None:
    namespace = await kv.declare("llama", layout={"kind": "opaque"})
    ids = namespace.ids(TOKENS)
    parent = "root"
    for chunk_id in ids:
        answer = await kv.put(chunk_id.hex(), payload(chunk_id, 200_000), namespace="llama", parent=parent)
        assert answer.status == 200
        parent = chunk_id.hex()
    headers = {"content-type": JSON}
    body = msgspec.json.encode({"ids": [each.hex() for each in ids]})
    fields = sign("POST", "/cache?mget", body, headers=headers)
    head = [*fields, ("content-length", str(len(body)))]
    reply = await reply_to(kv, head, body)
    views = reply.views()
    received = [bytes(await anext(views))]
    assert (await kv.driver.request("DELETE", f"/cache/{ids[0].hex()}")).status == 204
    await kv.node.reaper.reap_batch()
    assert len(kv.node.in_use) == len(ids)
    received += [bytes(view) async for view in views]
    assert [item.payload for item in parse_stream(b"".join(received))] == [payload(each, 200_000) for each in ids]
    await reply.aclose()
    assert not len(kv.node.in_use)
    again = await reply_to(kv, [*sign("POST", "/cache?mget", body, headers=headers), head[-1]], body)
    started = again.views()
    await anext(started)
    await started.aclose()  # type: ignore[attr-defined]
    await again.aclose()
    assert not len(kv.node.in_use)


async def reply_to(kv: KvDriver, fields: list[tuple[str, str]], body: bytes) -> BodyStream:
    head = RequestHead("POST", "/cache?mget", tuple(fields), "0" * 16, "127.0.0.1")
    reply = await kv.driver.service.handle(head, FakeBody(body))
    assert reply.status == 200
    assert not isinstance(reply.body, bytes)
    return reply.body


# -- mput -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("durability", ["memory", "local"])
async def test_mput_stores_a_chain_in_one_step(kv: KvDriver, form: str, durability: str) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    answer = await kv.mput(chain_stream(namespace, ids), form=form, x_kvobj_durability=durability)
    assert answer.status == 200, answer.value
    items = answer.value["items"]
    assert [item["status"] for item in items] == [200] * 5
    assert [item["existed"] for item in items] == [False] * 5
    assert [item["durability"] for item in items] == [durability] * 5
    assert [item["id"] for item in items] == [each if form == MSGPACK else each.hex() for each in ids]
    assert (await kv.match("llama", tokens=TOKENS)).value["matched"] == 5
    for chunk_id in ids:
        read = await kv.driver.get(f"/cache/{chunk_id.hex()}")
        assert (read.status, read.body) == (200, payload(chunk_id))


async def test_what_a_batch_left_in_memory_gets_its_digest_and_is_written_down(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    assert (await kv.mput(chain_stream(namespace, ids), x_kvobj_durability="memory")).status == 200
    found = await kv.match("llama", form=MSGPACK, tokens=tokens_in(MSGPACK, TOKENS), detail="chunks")
    assert [chunk["digest"] for chunk in found.value["chunks"]] == [blake3(payload(each)).digest() for each in ids]
    assert kv.node.dram.dirty_bytes > 0
    assert await flush(kv.node, timeout_seconds=30)
    assert kv.node.dram.dirty_bytes == 0
    assert {row.durability for row in await rows(kv)} == {Durability.LOCAL}


async def test_mput_goes_on_under_what_is_stored_and_passes_over_what_it_brings_again(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    await kv.put_chain(namespace, ids[:2])
    before = {row.key: row for row in await rows(kv)}
    answer = await kv.mput(chain_stream(namespace, ids))
    assert [item["existed"] for item in answer.value["items"]] == [True, True, False, False, False]
    after = {row.key: row for row in await rows(kv)}
    assert all(after[key].blobs[0].blob_id == row.blobs[0].blob_id for key, row in before.items())
    assert len(after) == 5
    tail = namespace.ids([*TOKENS, *range(16)])[5]
    under = await kv.mput(chain_stream(namespace, [tail], parent=ids[4]))
    assert [item["status"] for item in under.value["items"]] == [200]


async def test_a_chunk_whose_parent_is_unknown_is_refused_with_those_that_need_it(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    other = namespace.ids([9, 9])
    items: list[tuple[dict[str, object], bytes]] = [
        ({"id": ids[1], "parent": ids[0], "namespace": "llama"}, payload(ids[1])),
        ({"id": ids[2], "parent": ids[1], "namespace": "llama"}, payload(ids[2])),
        ({"id": other[0], "parent": "root", "namespace": "llama", "tokens": 2}, payload(other[0], CHUNK_BYTES // 8)),
    ]
    answer = await kv.mput(stream(items))
    told = answer.value["items"]
    assert [item["status"] for item in told] == [409, 409, 200]
    assert told[0]["error"]["code"] == "ParentNotFound"
    assert told[0]["error"]["detail"]["parent"] == ids[0].hex()
    assert [row.key for row in await rows(kv)] == [other[0].hex()]


async def test_a_cycle_of_parents_is_refused(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    one, two = b"\1" * 32, b"\2" * 32
    items: list[tuple[dict[str, object], bytes]] = [
        ({"id": one, "parent": two, "namespace": namespace.name}, payload(one)),
        ({"id": two, "parent": one, "namespace": namespace.name}, payload(two)),
    ]
    answer = await kv.mput(stream(items))
    assert [item["error"]["code"] for item in answer.value["items"]] == ["ParentNotFound", "ParentNotFound"]
    own = await kv.mput(stream([({"id": one, "parent": one, "namespace": namespace.name}, payload(one))]))
    assert [item["error"]["code"] for item in own.value["items"]] == ["ParentNotFound"]
    assert await rows(kv) == []


async def test_another_size_under_a_live_key_is_refused_alone(kv: KvDriver) -> None:
    assert (await kv.put("a", b"xx")).status == 200
    answer = await kv.mput(stream([({"id": "a"}, b"xxx"), ({"id": "b"}, b"y")]))
    assert [item["status"] for item in answer.value["items"]] == [409, 200]
    assert answer.value["items"][0]["error"]["code"] == "ImmutableChunk"
    assert (await kv.driver.get("/cache/a")).body == b"xx"


async def test_a_quota_refuses_what_is_above_it(kv: KvDriver) -> None:
    namespace = await kv.declare("llama", quota={"chunks": 3})
    answer = await kv.mput(chain_stream(namespace, namespace.ids(TOKENS)))
    codes = [item.get("error", {}).get("code") for item in answer.value["items"]]
    assert codes == [None, None, None, "QuotaExceeded", "ParentNotFound"]
    assert len(await rows(kv)) == 3


def wrong_streams(ids: list[bytes]) -> list[tuple[str, bytes, str]]:
    good: dict[str, object] = {"id": ids[0], "parent": "root", "namespace": "llama"}
    data = payload(ids[0])
    whole = stream([(good, data)])
    return [
        ("no end", framed({**good, "i": 0, "size_bytes": len(data)}, data), "IncompleteBody"),
        ("cut inside a payload", whole[:100], "IncompleteBody"),
        ("cut inside a length", whole[:2], "IncompleteBody"),
        ("empty", b"", "IncompleteBody"),
        ("bytes after the end", whole + b"x", "InvalidRequest"),
        ("an end that counts other items", stream([(good, data)], count=2), "IncompleteBody"),
        ("a header of no bytes", b"\0\0\0\0", "InvalidRequest"),
        ("a header too long", b"\xff\xff\xff\x7f" + b"x" * 10, "InvalidRequest"),
        ("a header that is no msgpack", b"\3\0\0\0\xc1\xc1\xc1", "InvalidRequest"),
        ("a header that is no map", b"\1\0\0\0\1", "InvalidRequest"),
        ("an unknown field", stream([({**good, "colour": 1}, data)]), "InvalidRequest"),
        ("items out of order", framed({**good, "i": 1, "size_bytes": 0}), "InvalidRequest"),
        ("a size that the body does not have", framed({**good, "i": 0, "size_bytes": CHUNK_BYTES}), "IncompleteBody"),
        ("a size above all", framed({**good, "i": 0, "size_bytes": 2**62}), "LayoutMismatch"),
        ("a negative size", framed({**good, "i": 0, "size_bytes": -1}), "InvalidRequest"),
        ("another size than the layout's", stream([(good, b"xxx")]), "LayoutMismatch"),
        ("no id", stream([({"namespace": "llama", "parent": "root"}, data)]), "InvalidChunkId"),
        ("an id of 31 bytes", stream([({**good, "id": ids[0][:31]}, data)]), "InvalidChunkId"),
        ("an id that is a number", stream([({**good, "id": 7}, data)]), "InvalidChunkId"),
        ("a parent of 31 bytes", stream([({**good, "parent": ids[0][:31]}, data)]), "InvalidChunkId"),
        ("no parent where one is needed", stream([({**good, "parent": None}, data)]), "InvalidRequest"),
        ("too many tokens", stream([({**good, "tokens": 17}, data)]), "InvalidTokens"),
        ("no tokens", stream([({**good, "tokens": 0}, data)]), "InvalidRequest"),
        ("one key twice", stream([(good, data), (good, data)]), "InvalidRequest"),
        ("two namespaces", stream([(good, data), ({"id": "x"}, b"x")]), "InvalidRequest"),
        ("an absent namespace", stream([({**good, "namespace": "absent"}, data)]), "NoSuchNamespace"),
        ("another codec", stream([({**good, "codec": "xa"}, data)]), "InvalidRequest"),
        ("a layer", stream([({**good, "layer": 0}, data)]), "InvalidRequest"),
        ("another digest", stream([({**good, "digest": b"\0" * 32}, data)]), "BadDigest"),
        ("a short digest", stream([({**good, "digest": b"\0" * 31}, data)]), "InvalidRequest"),
        ("1,001 chunks", stream([({"id": f"k{index}"}, b"") for index in range(1001)]), "InvalidRequest"),
    ]


async def test_a_wrong_stream_is_refused_whole_and_leaves_nothing(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    ids = namespace.ids(TOKENS)
    for name, body, code in wrong_streams(ids):
        answer = await kv.mput(body)
        assert answer.code == code, name
        assert await nothing_is_left(kv), name
    # The first good item of a bad stream is given up with it.
    late = chain_stream(namespace, ids)[:-40]
    assert (await kv.mput(late)).status == 400
    assert await nothing_is_left(kv)
    assert (await kv.mput(chain_stream(namespace, ids))).status == 200


async def test_a_batch_that_can_never_fit_is_refused_before_its_body(kv: KvDriver) -> None:
    body = FakeBody(b"", length=16 * (1 << 20) + 1)
    answer = await kv.mput(body, payload_hash="UNSIGNED-PAYLOAD")
    assert (answer.status, answer.code) == (400, "EntityTooLarge")
    assert not body.accepted


async def test_a_body_that_is_not_what_was_signed_leaves_nothing(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    body = chain_stream(namespace, namespace.ids(TOKENS))
    answer = await kv.mput(body, payload_hash="0" * 64)
    assert answer.code == "XAmzContentSHA256Mismatch"
    wrong = await kv.mput(body, x_amz_checksum_crc32="AAAAAA==")
    assert wrong.code == "BadDigest"
    assert await nothing_is_left(kv)
    assert (await kv.mput(body, payload_hash="UNSIGNED-PAYLOAD")).status == 200


@pytest.mark.parametrize("mode", ["STREAMING-UNSIGNED-PAYLOAD-TRAILER", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"])
async def test_a_stream_may_come_in_aws_chunks(kv: KvDriver, mode: str) -> None:
    namespace = await kv.declare("llama")
    body = chain_stream(namespace, namespace.ids(TOKENS))
    headers = {"content-type": "application/vnd.kvobj.stream", "x-amz-decoded-content-length": str(len(body))}
    pieces = [body[start : start + 9000] for start in range(0, len(body), 9000)]
    if "UNSIGNED" in mode:
        headers["x-amz-trailer"] = "x-amz-checksum-crc32"
        crc = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
        fields = sign("POST", "/cache?mput", headers=headers, payload=mode)
        framed_body = unsigned_chunks(pieces, [("x-amz-checksum-crc32", crc)])
    else:
        fields = sign("POST", "/cache?mput", headers=headers, payload=mode)
        seed, stamp = seed_of(fields)
        framed_body = signed_chunks(pieces, user=ALICE, seed=seed, stamp=stamp)
    answer = await kv.driver.send("POST", "/cache?mput", fields, framed_body)
    assert answer.status == 200, answer.body
    assert len(await rows(kv)) == 5


async def test_only_who_may_write_puts_batches(kv: KvDriver) -> None:
    reader = await kv.declare("read", access={"bob": "read"})
    writer = await kv.declare("write", access={"bob": "write"})
    assert (await kv.mput(chain_stream(reader, reader.ids(TOKENS)), user=BOB)).code == "AccessDenied"
    assert await nothing_is_left(kv)
    assert (await kv.mput(chain_stream(writer, writer.ids(TOKENS)), user=BOB)).status == 200


async def test_a_client_that_goes_away_in_the_middle_leaves_nothing(kv: KvDriver) -> None:
    namespace = await kv.declare("llama")
    whole = chain_stream(namespace, namespace.ids(TOKENS))
    answer = await kv.mput(FakeBody(whole[:5000], length=len(whole)), payload_hash="UNSIGNED-PAYLOAD")
    assert answer.code == "IncompleteBody"
    assert await nothing_is_left(kv)


async def test_batches_wait_for_room_and_all_of_them_get_in(kv: KvDriver) -> None:
    await kv.declare("engine", ids="foreign", layout={"kind": "opaque"})

    def body(number: int) -> bytes:
        items: list[tuple[dict[str, object], bytes]] = [
            ({"id": f"{number}-{index}", "namespace": "engine"}, payload(b"%d-%d" % (number, index), 1 << 18))
            for index in range(6)
        ]
        return stream(items)

    answers = await asyncio.gather(*[kv.mput(body(number), payload_hash="UNSIGNED-PAYLOAD") for number in range(5)])
    assert [answer.status for answer in answers] == [200] * 5
    assert len(await rows(kv)) == 30
    _, items = await kv.mget({"namespace": "engine", "ids": [f"4-{index}" for index in range(6)]})
    assert [item.payload for item in items] == [payload(b"4-%d" % index, 1 << 18) for index in range(6)]
