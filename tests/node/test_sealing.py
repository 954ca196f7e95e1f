"""Chunks that are hashed after their acknowledgement: none is forgotten, whenever it comes."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from blake3 import blake3
from following_world import OpenBody
from kv_driver import KvDriver, kv_node
from tier_codecs import wait_for

from kvobj.codec.checksums import Digester, fast_algorithms
from kvobj.store import sealing as sealing_module
from kvobj.store.hashing import INLINE_BYTES
from kvobj.store.rooms import HASH_LATER_BYTES_MAX


async def put_unhashed(kv: KvDriver, key: str) -> None:
    """A PUT whose body nothing is to be computed of before the reply, and too large to be hashed where it is."""
    headers = {"x-kvobj-durability": "memory"}
    answer = await kv.driver.request(
        "PUT", f"/cache/{key}", body=b"x" * (INLINE_BYTES + 1), headers=headers, payload="UNSIGNED-PAYLOAD"
    )
    assert answer.status == 200


async def test_a_chunk_that_is_committed_while_the_hashing_ends_is_written_down_too(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kv_node(tmp_path, shm_path) as kv:
        sealing, loop = kv.node.sealing, asyncio.get_running_loop()
        follow, end = sealing.follow, sealing._hurry.clear
        late: list[Callable[[], None]] = []
        await put_unhashed(kv, "a")
        monkeypatch.setattr(sealing, "follow", lambda *blob, **named: late.append(partial(follow, *blob, **named)))
        await put_unhashed(kv, "b")
        assert len(late) == 1

        def end_and_follow() -> None:
            # Runs once the task that hashes is done, and before anybody is told so.
            loop.call_soon(lambda: late.pop()() if late else None)
            end()

        monkeypatch.setattr(sealing._hurry, "clear", end_and_follow)
        await wait_for(lambda: kv.node.write_behind.backlog.objects == 2, timeout_seconds=5.0)


async def test_a_small_chunk_has_its_digest_when_it_is_acknowledged(tmp_path: Path, shm_path: Path) -> None:
    body = b"x" * INLINE_BYTES
    async with kv_node(tmp_path, shm_path) as kv:
        answer = await kv.driver.request(
            "PUT", "/cache/a", body=body, headers={"x-kvobj-durability": "memory"}, payload="UNSIGNED-PAYLOAD"
        )
        assert answer.headers["x-kvobj-digest"] == blake3(body).hexdigest()
        assert not kv.node.sealing._follow_ups


@pytest.mark.parametrize("algorithm", sorted(fast_algorithms()))
async def test_a_checksum_that_was_announced_is_compared_before_the_reply_though_the_digest_follows(
    tmp_path: Path, shm_path: Path, algorithm: str
) -> None:
    body = b"x" * (INLINE_BYTES + 1)
    digester = Digester(frozenset({algorithm}))
    digester.update(memoryview(body))
    right, name = digester.base64(algorithm), f"x-amz-checksum-{algorithm}"
    wrong = base64.b64encode(bytes(len(base64.b64decode(right)))).decode()
    async with kv_node(tmp_path, shm_path) as kv:
        sealing = kv.node.sealing
        headers = {"x-kvobj-durability": "memory", name: wrong}
        answer = await kv.driver.request("PUT", "/cache/a", body=body, headers=headers, payload="UNSIGNED-PAYLOAD")
        assert (answer.status, len(sealing._follow_ups)) == (400, 0)
        headers[name] = right
        answer = await kv.driver.request("PUT", "/cache/a", body=body, headers=headers, payload="UNSIGNED-PAYLOAD")
        assert (answer.status, len(sealing._follow_ups)) == (200, 1)
        assert answer.headers[name] == right
        assert "x-kvobj-digest" not in answer.headers
        await sealing.drain()
        told = await kv.driver.request("HEAD", "/cache/a", headers={"x-amz-checksum-mode": "ENABLED"})
        assert (told.headers[name], told.headers["x-kvobj-digest"]) == (right, blake3(body).hexdigest())


async def test_a_long_body_is_hashed_while_it_arrives_where_much_was_put_off_or_its_writer_waits(
    tmp_path: Path, shm_path: Path
) -> None:
    body = bytes(HASH_LATER_BYTES_MAX + 1)
    async with kv_node(tmp_path, shm_path, dram_mib=64) as kv:
        sealing, put_off = kv.node.sealing, []
        for key, bytes_max, want in (("a", len(body), "row"), ("b", len(body) - 1, "row"), ("c", len(body), "digest")):
            sealing._delayed_bytes_max = bytes_max
            headers = {"x-kvobj-durability": "memory", "x-kvobj-want": want}
            answer = await kv.driver.request(
                "PUT", f"/cache/{key}", body=body, headers=headers, payload="UNSIGNED-PAYLOAD"
            )
            assert answer.status == 200
            put_off.append(len(sealing._unsealed))
            await sealing.drain()
            told = await kv.driver.request("HEAD", f"/cache/{key}")
            assert told.headers["x-kvobj-digest"] == blake3(body).hexdigest()
        assert put_off == [1, 0, 0]


async def test_hashing_that_was_put_off_waits_for_a_chunk_that_comes_and_not_for_one_that_stalls(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS", 0.5)
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS_MAX", 60.0)
    monkeypatch.setattr(sealing_module, "BURST_BYTES", 2)
    body = OpenBody(8 * 1024 * 1024)
    async with kv_node(tmp_path, shm_path, dram_mib=64) as kv:
        headers = {"x-kvobj-durability": "memory"}
        slow = asyncio.create_task(
            kv.driver.request("PUT", "/cache/slow", body=body, headers=headers, payload="UNSIGNED-PAYLOAD")
        )
        body.send(b"x")
        await wait_for(lambda: len(kv.node.store.arriving) == 1, timeout_seconds=5.0)
        await put_unhashed(kv, "first")
        (first,) = kv.node.sealing._follow_ups.values()
        for _ in range(100):
            body.send(b"xx")
            await asyncio.wait([first], timeout=0.01)
        assert not first.done()
        await asyncio.wait_for(first, 5.0)
        assert not slow.done()
        body.vanish()
        assert (await slow).status == 400


async def test_hashing_that_was_put_off_waits_while_clients_on_the_host_read_much(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS", 0.5)
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS_MAX", 60.0)
    monkeypatch.setattr(sealing_module, "BURST_BYTES", 1000)
    async with kv_node(tmp_path, shm_path) as kv:
        await put_unhashed(kv, "first")
        (first,) = kv.node.sealing._follow_ups.values()
        for _ in range(100):
            kv.node.host_reads.note(1000)
            await asyncio.wait([first], timeout=0.01)
        assert not first.done()
        while not first.done():  # two bytes in a hundredth of a second are little
            kv.node.host_reads.note(2)
            await asyncio.wait([first], timeout=0.01)


async def test_hashing_that_was_put_off_waits_while_a_client_on_the_host_has_much_open_ahead_of_its_reading(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS", 0.1)
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS_MAX", 60.0)
    monkeypatch.setattr(sealing_module, "BURST_BYTES", 1000)
    async with kv_node(tmp_path, shm_path) as kv:
        await put_unhashed(kv, "first")
        (first,) = kv.node.sealing._follow_ups.values()
        kv.node.host_reads.ahead_bytes = 1000
        await asyncio.wait([first], timeout=0.5)
        assert not first.done()
        kv.node.host_reads.ahead_bytes = 999
        await asyncio.wait_for(first, 5.0)


class HeldPool(ThreadPoolExecutor):
    """A pool whose jobs wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(2)
        self.begun = 0
        self.let_go = threading.Event()

    def submit(self, job, /, *arguments, **named):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN201
        self.begun += 1

        def held() -> object:
            self.let_go.wait(10.0)
            return job(*arguments, **named)

        return super().submit(held)


async def test_hashing_waits_again_where_a_burst_goes_on_after_all(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS", 1.5)
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS_MAX", 60.0)
    monkeypatch.setattr(sealing_module, "SEAL_BATCH_BYTES", 1)
    with HeldPool() as pool:
        async with kv_node(tmp_path, shm_path) as kv:
            sealing = kv.node.sealing
            monkeypatch.setattr(sealing, "_executor", pool)
            for key in "abc":
                await put_unhashed(kv, key)
            digests = list(sealing._follow_ups.values())
            await wait_for(lambda: pool.begun == 2, timeout_seconds=15.0)
            await put_unhashed(kv, "d")
            pool.let_go.set()
            await asyncio.wait(digests[:2], timeout=5.0)
            for count in range(50):
                await put_unhashed(kv, f"next-{count}")
                await asyncio.wait([digests[2]], timeout=0.01)
            assert [digest.done() for digest in digests] == [True, True, False]
            await asyncio.wait_for(digests[2], 15.0)
            await sealing.drain()


async def test_a_burst_that_does_not_end_is_hashed_all_the_same(
    tmp_path: Path, shm_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS", 0.05)
    monkeypatch.setattr(sealing_module, "SEAL_DELAY_SECONDS_MAX", 0.1)
    async with kv_node(tmp_path, shm_path) as kv:
        sealing, loop = kv.node.sealing, asyncio.get_running_loop()
        await put_unhashed(kv, "first")
        (first,) = sealing._follow_ups.values()
        deadline, count = loop.time() + 5.0, 0
        while not first.done() and loop.time() < deadline:
            await put_unhashed(kv, f"next-{count}")
            count += 1
        assert first.done()
