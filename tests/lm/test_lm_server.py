"""`lm://` over a whole node: what is put comes back as it was, and nothing that goes wrong puts a connection out of step."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path

import msgspec
import pytest
from kv_driver import payload, rows
from lm_peers import (
    EXIST,
    FAIL,
    FORM,
    GET,
    HEAD_BYTES,
    HEALTH,
    LIST,
    NO_FORM,
    PUT,
    SUCCESS,
    Told,
    lm_node,
    request,
    until,
)
from s3_driver import ALICE, BOB, ROOT
from tier_codecs import LAYOUT, TOKENS, lossy, tensor

from kvobj.api.lm import LmCommands, LmLimits
from kvobj.api.lm.commands import OpenChunk
from kvobj.app.node import flush
from kvobj.catalog.rows import CommitMode
from kvobj.config import LmSettings
from kvobj.ids import BlobId
from kvobj.wire.body_handover import ReceiveMode


def damage(directory: Path, body: bytes) -> None:
    """Flip a bit of the body where it lies on disk."""
    for path in directory.iterdir():
        written = path.read_bytes() if path.is_file() else b""
        position = written.find(body[:4096])
        if position >= 0:
            with path.open("r+b") as segment:
                segment.seek(position + 1000)
                segment.write(bytes([body[1000] ^ 1]))
            return
    raise AssertionError("the body is nowhere on disk")


KEY = "org/model-8b@1@0@00ff12@bfloat16"
HEALTH_CHECK = "test@1@0@0@bfloat16"
"""LMCache's, by which it asks whether its server is well."""
MISS = Told(FAIL, NO_FORM, b"")
MIB = 2**20


@pytest.mark.parametrize("receive_mode", list(ReceiveMode))
async def test_what_is_put_comes_back_with_its_form(tmp_path: Path, shm_path: Path, receive_mode: ReceiveMode) -> None:
    async with lm_node(tmp_path, shm_path, receive_mode=receive_mode) as lm:
        writer, reader = await lm.connect(), await lm.connect()
        for index, size in enumerate((0, 1, 2048, 4097, 70_000, MIB, 9 * MIB + 1)):
            key, body, form = f"{KEY}-{size}", payload(b"%d" % index, size), (index, -index, size, 0, -1, 2**31 - 1)
            assert await reader.ask(GET, key) == MISS
            await writer.put(key, body, form)
            assert await writer.has(key)
            assert await reader.ask(GET, key) == Told(SUCCESS, form, body)
        assert lm.count("put", "stored") == 7
        assert lm.is_clean


async def test_a_small_chunk_comes_with_its_head_in_one_segment(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.put(KEY, payload(b"x", 2048))
        assert await peer.has(KEY)
        loop = asyncio.get_running_loop()
        with socket.socket() as plain:
            plain.setblocking(False)  # noqa: FBT003 - its own name for it
            await loop.sock_connect(plain, ("127.0.0.1", lm.port))
            await loop.sock_sendall(plain, request(GET, KEY))
            assert len(await loop.sock_recv(plain, 2 * MIB)) == HEAD_BYTES + 2048


async def test_a_client_that_sends_heads_and_bodies_apart_does_not_wait_for_acknowledgements(
    tmp_path: Path, shm_path: Path
) -> None:
    """As LMCache does, without TCP_NODELAY: each small piece is kept back until the one before it is acknowledged."""

    def seconds_of_puts(port: int) -> list[float]:
        seconds = []
        with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
            for index in range(40):  # a connection's first segments are acknowledged at once anyway
                began = time.monotonic()
                plain.sendall(request(PUT, f"k{index}", length=2048, form=FORM))
                plain.sendall(payload(b"x", 2048))
                plain.sendall(request(EXIST, f"k{index}"))
                assert plain.recv(HEAD_BYTES, socket.MSG_WAITALL)[:1] == bytes([SUCCESS])
                seconds.append(time.monotonic() - began)
        return seconds

    async with lm_node(tmp_path, shm_path) as lm:
        seconds = await asyncio.to_thread(seconds_of_puts, lm.port)
        assert min(seconds[-15:]) < 0.03


async def test_health_and_the_list_of_keys_are_answered(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        assert await peer.ask(HEALTH) == Told(SUCCESS, NO_FORM, b"")
        assert await peer.ask(LIST) == Told(SUCCESS, NO_FORM, b"")
        for key in ("b@1", "a@1", "é@1"):
            await peer.put(key, b"bytes")
        assert (await lm.kv.put("aa", b"of an S3 client")).status == 200
        assert await peer.ask(LIST) == Told(SUCCESS, NO_FORM, "a@1\nb@1\né@1".encode())


async def test_requests_in_one_segment_are_answered_in_order(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        bodies = [payload(b"%d" % index, 3000 + index) for index in range(20)]
        sent = b""
        for index, body in enumerate(bodies):
            sent += request(PUT, f"k{index}", length=len(body), form=FORM) + body + request(GET, f"k{index}")
        await peer.send(sent[:1], sent[1:200], sent[200:])
        for body in bodies:
            assert await peer.told() == Told(SUCCESS, FORM, body)


async def test_s3_clients_read_what_was_put_and_what_they_put_without_a_form_is_a_miss(
    tmp_path: Path, shm_path: Path
) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.put(KEY, b"sixteen bytes it")
        assert await peer.has(KEY)
        answer = await lm.kv.driver.request("GET", f"/cache/{KEY.replace('@', '%40')}")
        assert (answer.status, answer.body) == (200, b"sixteen bytes it")
        assert answer.headers["x-amz-meta-lmcache-form"] == "1 3 2 32 256 1024"
        assert (await lm.kv.put("plain", b"sixteen bytes it")).status == 200
        assert await peer.ask(GET, "plain") == MISS
        assert not await peer.has("plain")
        headers = {"x-amz-meta-lmcache-form": "1 3 2 32 256 1024"}
        answer = await lm.kv.driver.request("PUT", "/cache/told", body=b"by S3", headers=headers)
        assert answer.status == 200
        assert await peer.ask(GET, "told") == Told(SUCCESS, FORM, b"by S3")


async def test_a_key_that_begins_with_a_namespace_belongs_to_it(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        await lm.kv.declare("org", ids="foreign", layout={"kind": "opaque"})
        await lm.kv.declare("strict", ids="foreign")
        peer = await lm.connect()
        await peer.put(KEY, b"bytes")
        await peer.put("strict/model@1", b"not the size that its layout says")
        await peer.put("elsewhere/model@1", b"bytes")
        assert await peer.has(KEY)
        assert await peer.has("elsewhere/model@1")
        assert not await peer.has("strict/model@1")
        assert {row.key: row.namespace for row in await rows(lm.kv)} == {KEY: "org", "elsewhere/model@1": "default"}
        assert lm.count("put", "refused") == 1


async def test_the_first_writer_stands_and_another_form_or_size_is_dropped(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.put(KEY, b"first")
        await peer.put(KEY, b"FIRST")
        await peer.put(KEY, payload(b"longer", 300_000))
        await peer.put(KEY, b"first", NO_FORM)
        assert await peer.ask(GET, KEY) == Told(SUCCESS, FORM, b"first")
        assert (lm.count("put", "existed"), lm.count("put", "refused")) == (1, 2)
        assert any("put refused" in line for line in lm.log)


async def test_the_health_check_of_each_connection_gets_what_it_put_last_and_nobody_elses(
    tmp_path: Path, shm_path: Path
) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peers = [await lm.connect(), await lm.connect()]
        for turn in range(3):
            bodies = [payload(b"%d of %d" % (turn, index), 5000 + index) for index in range(2)]
            for peer, body in zip(peers, bodies, strict=True):
                await peer.put(HEALTH_CHECK, body)
            for peer, body in zip(peers, bodies, strict=True):
                assert await peer.has(HEALTH_CHECK)
                assert await peer.ask(GET, HEALTH_CHECK) == Told(SUCCESS, FORM, body)
        assert len(await rows(lm.kv)) == 2, "what was put before goes with the next"
        assert not await (await lm.connect()).has(HEALTH_CHECK)
        assert lm.count("put", "stored") == 6
        for peer in peers:
            peer.vanish()
        await until(lambda: lm.value("kvobj_lm_connections") == 1)
        assert await rows(lm.kv) == [], "and with its connection"


async def test_a_health_check_that_breaks_off_leaves_nothing_and_others_have_theirs(
    tmp_path: Path, shm_path: Path
) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        other, peer = await lm.connect(), await lm.connect()
        await other.put(HEALTH_CHECK, b"other")
        await peer.put(HEALTH_CHECK, b"whole")
        assert await peer.has(HEALTH_CHECK)
        await peer.send(request(PUT, HEALTH_CHECK, length=MIB, form=FORM), payload(b"x", 5000))
        peer.vanish()
        await until(lambda: lm.value("kvobj_lm_connections") == 1)
        assert await other.ask(GET, HEALTH_CHECK) == Told(SUCCESS, FORM, b"other")
        assert len(await rows(lm.kv)) == 1
        assert lm.is_clean


async def test_a_put_that_breaks_off_leaves_nothing(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        watcher = await lm.connect()
        for cut in (1, 185, 186, 187, 186 + 500_000):
            peer = await lm.connect()
            whole = request(PUT, KEY, length=MIB, form=FORM) + payload(b"x", MIB)
            await peer.send(whole[:cut])
            assert not await watcher.has(KEY)
            peer.vanish()
        await until(lambda: lm.value("kvobj_lm_connections") == 1)
        await until(lambda: lm.is_clean)
        assert await watcher.ask(GET, KEY) == MISS
        assert await rows(lm.kv) == []
        assert not len(lm.kv.node.store.arriving)


async def test_a_length_beyond_all_room_holds_no_more_than_two_blobs_and_goes_with_its_client(
    tmp_path: Path, shm_path: Path
) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        before = lm.kv.node.arena.reserved_bytes
        greedy, other = await lm.connect(), await lm.connect()
        await greedy.send(request(PUT, KEY, length=2**31 - 1, form=FORM), payload(b"x", MIB))
        await other.put("small", b"bytes")
        assert await other.has("small")
        assert lm.kv.node.arena.reserved_bytes - before <= lm.kv.node.arena.capacity_bytes // 2
        greedy.vanish()
        await until(lambda: lm.value("kvobj_lm_connections") == 1)
        assert not await other.has(KEY)
        assert (await other.ask(GET, "small")).body == b"bytes"
        assert lm.is_clean


@pytest.mark.parametrize("key", [b"", b"\xff", b"a\0b"])
async def test_a_key_that_is_none_is_dropped_or_missed_and_the_next_request_is_answered(
    tmp_path: Path, shm_path: Path, key: bytes
) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.send(request(PUT, key, length=200_000), payload(b"x", 200_000))
        assert await peer.ask(EXIST, key) == MISS
        assert await peer.ask(GET, key) == MISS
        assert (await peer.ask(HEALTH)).code == SUCCESS
        assert lm.count("put", "refused") == 1
        assert lm.count("get", "miss") == 1


@pytest.mark.parametrize(
    "head", [request(0, KEY), request(6, KEY), request(PUT, KEY, length=-1), b"GET / HTTP/1.1\r\n\r\n".ljust(186)]
)
async def test_what_is_no_request_ends_the_connection(tmp_path: Path, shm_path: Path, head: bytes) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.send(head)
        assert await peer.is_ended()
        assert any("connection ended" in line for line in lm.log)
        assert (await (await lm.connect()).ask(HEALTH)).code == SUCCESS


async def test_a_full_store_drops_puts_and_stays_in_step(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        placement = lm.kv.node.store._rooms._placement
        peer = await lm.connect()
        await peer.put("before", b"there was room")
        assert await peer.has("before")
        room = placement.dirty_bytes_max - placement.cache.dirty_bytes
        await placement.reserve_dirty(room)
        await peer.put(KEY, payload(b"x", MIB))
        assert await peer.ask(GET, KEY) == MISS
        placement.unreserve_dirty(room)
        assert lm.count("put", "full") == 1
        assert [line for line in lm.log if "put full 1" in line]
        await peer.put(KEY, payload(b"x", MIB))
        assert (await peer.ask(GET, KEY)).body == payload(b"x", MIB)
        assert lm.is_clean


async def test_a_length_that_never_fits_is_read_to_its_end_and_dropped(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        await lm.kv.declare("small", ids="foreign", layout={"kind": "opaque"}, quota={"size_bytes": 1000})
        peer = await lm.connect()
        await peer.put("small/model@1", payload(b"x", 2 * MIB))
        assert not await peer.has("small/model@1")
        assert lm.value("kvobj_lm_received_bytes_total") == 2 * MIB
        assert lm.count("put", "refused") == 1


async def test_a_body_that_will_never_come_holds_nothing_for_longer_than_the_deadline(
    tmp_path: Path, shm_path: Path
) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        half, silent, idle = [await lm.connect() for _ in range(3)]
        assert not await idle.has(KEY)
        await half.send(request(PUT, KEY)[:100])
        await silent.send(request(PUT, KEY, length=MIB, form=FORM), payload(b"x", 1000))
        await until(lambda: len(lm.kv.node.store.arriving) == 1)
        assert not await idle.has(KEY)
        lm.turn(61)
        assert await half.is_ended()
        assert await silent.is_ended()
        assert lm.value("kvobj_lm_stalled_connections_total") == 2
        lm.turn(86400)
        assert not await idle.has(KEY)
        await until(lambda: lm.is_clean)
        assert not len(lm.kv.node.store.arriving)


async def test_who_takes_nothing_of_a_reply_is_reset_and_holds_nothing(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.put(KEY, payload(b"x", 20 * MIB))
        assert await peer.has(KEY)
        loop = asyncio.get_running_loop()
        with socket.socket() as plain:
            plain.setblocking(False)  # noqa: FBT003 - its own name for it
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(plain, ("127.0.0.1", lm.port))
            await loop.sock_sendall(plain, request(GET, KEY))
            await until(lambda: bool(len(lm.kv.node.in_use)))
            await until(lambda: any(connection.wire.is_flushing for connection in lm.server._connections))
            lm.turn(61)
            await until(lambda: lm.is_clean)
        assert lm.value("kvobj_lm_cut_replies_total") == 1


async def test_only_who_is_allowed_may_connect_and_only_so_many(tmp_path: Path, shm_path: Path) -> None:
    limits = LmLimits(allow=(ip_network("10.0.0.0/8"),))
    async with lm_node(tmp_path, shm_path, limits=limits) as lm:
        assert await (await lm.connect()).is_ended()
        assert lm.value("kvobj_lm_refused_connections_total", reason="address") == 1
    limits = LmLimits(allow=LmSettings().allow, connections=2)
    async with lm_node(tmp_path / "other", shm_path / "other", limits=limits) as lm:
        first, second = await lm.connect(), await lm.connect()
        assert not await first.has(KEY)
        assert not await second.has(KEY)
        assert await (await lm.connect()).is_ended()
        assert lm.value("kvobj_lm_refused_connections_total", reason="too many") == 1
        first.vanish()
        await until(lambda: lm.value("kvobj_lm_connections") == 1)
        assert not await (await lm.connect()).has(KEY)


async def test_a_user_who_may_not_or_is_gone_finds_and_stores_nothing(tmp_path: Path, shm_path: Path) -> None:
    for number, (user_id, bucket) in enumerate(
        ((BOB.id, "cache"), ("nobody", "cache"), (ALICE.id, "files"), (ALICE.id, "absent"))
    ):
        data, memory = tmp_path / str(number), shm_path / str(number)
        memory.mkdir()
        async with lm_node(data, memory, user_id=user_id, bucket=bucket) as lm:
            peer = await lm.connect()
            await peer.put(KEY, b"bytes")
            assert await peer.ask(GET, KEY) == MISS
            assert (await peer.ask(HEALTH)).code == FAIL
            assert await rows(lm.kv) == []
            assert lm.count("put", "refused") + lm.count("put", "failed") == 1
    async with lm_node(tmp_path / "root", shm_path, user_id=ROOT.id) as lm:
        peer = await lm.connect()
        await peer.put(KEY, b"bytes")
        assert await peer.has(KEY)


async def test_what_is_removed_after_a_look_up_is_a_miss_and_the_next_put_stores_it_again(
    tmp_path: Path, shm_path: Path
) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.put(KEY, b"before")
        assert await peer.has(KEY)
        assert (await lm.kv.driver.request("DELETE", f"/cache/{KEY.replace('@', '%40')}")).status == 204
        assert await peer.ask(GET, KEY) == MISS
        await peer.put(KEY, b"another size")
        assert await peer.ask(GET, KEY) == Told(SUCCESS, FORM, b"another size")


async def test_damaged_bytes_are_a_miss_and_the_next_put_stores_them_again(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        node = lm.kv.node
        peer = await lm.connect()
        await peer.put(KEY, payload(b"x", MIB))
        assert await peer.has(KEY)
        assert await flush(node, timeout_seconds=20)
        (row,) = await rows(lm.kv)
        await node.dram.delete([BlobId(row.blobs[0].blob_id)])
        damage(node.nvme_directory, payload(b"x", MIB))
        assert await peer.ask(GET, KEY) == MISS
        assert not await peer.has(KEY)
        await peer.put(KEY, payload(b"x", MIB))
        assert (await peer.ask(GET, KEY)).body == payload(b"x", MIB)


async def test_a_drain_ends_idle_connections_and_lets_a_put_come_to_its_end(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        idle, busy = await lm.connect(), await lm.connect()
        assert not await idle.has(KEY)
        body = payload(b"x", MIB)
        await busy.send(request(PUT, KEY, length=MIB, form=FORM), body[:1000])
        await until(lambda: len(lm.kv.node.store.arriving) == 1)
        draining = asyncio.create_task(lm.server.drain(20))
        assert await idle.is_ended()
        assert not draining.done()
        await busy.send(body[1000:])
        assert await draining
        assert await busy.is_ended()
        assert [row.key for row in await rows(lm.kv)] == [KEY]


async def test_a_drain_gives_up_a_put_that_does_not_come(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.send(request(PUT, KEY, length=MIB, form=FORM), payload(b"x", 1000))
        await until(lambda: len(lm.kv.node.store.arriving) == 1)
        draining = asyncio.create_task(lm.server.drain(20))
        await asyncio.sleep(0)
        lm.turn(6)
        assert await draining
        assert await rows(lm.kv) == []
        assert lm.is_clean


async def test_a_chunk_larger_than_a_head_can_tell_is_absent_to_every_request(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.put(KEY, b"small")
        assert await peer.has(KEY)
        (row,) = await rows(lm.kv)
        (blob,) = row.blobs
        for size_bytes, name in ((2**31 - 1, "largest"), (2**31, "larger")):
            blob_id = blob.blob_id[:8] + (int.from_bytes(blob.blob_id[8:], "big") + size_bytes).to_bytes(8, "big")
            blob = msgspec.structs.replace(blob, blob_id=blob_id, plain_bytes=size_bytes)
            large = msgspec.structs.replace(row, key=name, blobs=(blob,), size_bytes=size_bytes)
            await lm.kv.node.catalog.commit(large, mode=CommitMode.FIRST_WRITER_WINS, now_ms=0)
        assert await peer.has("largest")
        assert not await peer.has("larger")
        assert await peer.ask(GET, "larger") == MISS
        assert (await peer.ask(LIST)).body.split(b"\n") == sorted([b"largest", KEY.encode()])
        assert (await peer.ask(GET, KEY)).body == b"small"
        assert lm.is_clean


async def test_a_reply_that_cannot_be_begun_ends_the_connection_and_holds_nothing(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = LmCommands.open

    async def unspeakable(commands: LmCommands, key: str) -> OpenChunk | None:
        """The chunk, with a form that no head has room for."""
        chunk = await opened(commands, key)
        return None if chunk is None else replace(chunk, form=replace(chunk.form, fmt=2**31))

    async with lm_node(tmp_path, shm_path) as lm:
        peer = await lm.connect()
        await peer.put(KEY, payload(b"x", MIB))
        assert await peer.has(KEY)
        assert await flush(lm.kv.node, timeout_seconds=20)
        with monkeypatch.context() as patched:
            patched.setattr(LmCommands, "open", unspeakable)
            await peer.send(request(GET, KEY))
            assert await peer.is_ended()
        await until(lambda: lm.is_clean)
        assert (await (await lm.connect()).ask(GET, KEY)).body == payload(b"x", MIB)


async def test_where_a_lossy_copy_alone_is_left_a_look_up_misses_as_a_get_does(tmp_path: Path, shm_path: Path) -> None:
    async with lm_node(tmp_path, shm_path) as lm:
        await lm.kv.declare(
            "org", ids="foreign", layout=LAYOUT, chunk_tokens=TOKENS, codecs={"nvme": lossy()}, lossy=True
        )
        peer = await lm.connect()
        await peer.put(KEY, tensor(1))
        assert await peer.has(KEY)
        assert await flush(lm.kv.node, timeout_seconds=20)
        (row,) = await rows(lm.kv)
        assert row.lossy is not None
        await lm.kv.node.dram.delete([BlobId(row.blobs[0].blob_id)])
        assert not await peer.has(KEY)
        assert await peer.ask(GET, KEY) == MISS
        await peer.put(KEY, tensor(1))
        assert await peer.has(KEY)
        assert (await peer.ask(GET, KEY)).body == tensor(1)
