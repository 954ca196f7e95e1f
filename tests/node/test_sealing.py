"""Chunks that are hashed after their acknowledgement: none is forgotten, whenever it comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from blake3 import blake3
from kv_driver import KvDriver, kv_node
from tier_codecs import wait_for

from kvobj.store.hashing import INLINE_BYTES


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
        step, loop = kv.node.commit_step, asyncio.get_running_loop()
        follow, end = step._follow, step._hurry.clear
        late: list[tuple[object, ...]] = []
        await put_unhashed(kv, "a")
        monkeypatch.setattr(step, "_follow", lambda *arguments: late.append(arguments))
        await put_unhashed(kv, "b")
        assert len(late) == 1

        def end_and_follow() -> None:
            # Runs once the task that hashes is done, and before anybody is told so.
            loop.call_soon(lambda: follow(*late.pop()) if late else None)  # type: ignore[arg-type]
            end()

        monkeypatch.setattr(step._hurry, "clear", end_and_follow)
        await wait_for(lambda: kv.node.write_behind.backlog.objects == 2, timeout_seconds=5.0)


async def test_a_small_chunk_has_its_digest_when_it_is_acknowledged(tmp_path: Path, shm_path: Path) -> None:
    body = b"x" * INLINE_BYTES
    async with kv_node(tmp_path, shm_path) as kv:
        answer = await kv.driver.request(
            "PUT", "/cache/a", body=body, headers={"x-kvobj-durability": "memory"}, payload="UNSIGNED-PAYLOAD"
        )
        assert answer.headers["x-kvobj-digest"] == blake3(body).hexdigest()
        assert not kv.node.commit_step._follow_ups
