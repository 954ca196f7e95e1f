"""Chunks that lie coded, in front of a remote: they go there and come back as what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from remote_servers import RemoteStore
from remote_world import until
from tier_codecs import Coded, coded_node, lossless, lossy, tensor

from kvobj.app.node import flush
from kvobj.catalog.rows import Durability, LossyCopy
from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule
from kvobj.config.settings import RemoteSettings
from kvobj.ids import BlobId
from kvobj.tensors.codecs import parse_tensor_frame


@pytest.fixture
def remote(kvobj_remote: RemoteStore) -> RemoteSettings:
    return replace(kvobj_remote.settings(), manifest_interval_seconds=0.05)


async def shared(coded: Coded, number: int) -> str:
    """Put a chunk of class `memory` into the bucket, which has everything uploaded, and wait until it is."""
    await coded.node.catalog.update_bucket("cache", BucketUpdate(remote=RemoteRule.ALWAYS))
    key = await coded.put(number)
    assert await flush(coded.node, timeout_seconds=20.0)

    async def is_shared() -> bool:
        return (await coded.row(key)).durability is Durability.SHARED

    await until(is_shared, "the chunk was not uploaded")
    return key


async def leave(coded: Coded, key: str) -> None:
    """Let the chunk lie on the remote alone."""
    row = await coded.row(key)
    blob_ids = [BlobId(blob_id) for blob_id in row.blob_ids]
    await coded.node.read_tier.promotions_done()

    async def has_left() -> bool:
        await coded.node.collector.make_room(1)  # which may not have been told yet that the row is shared
        return await coded.node.nvme.missing(blob_ids) == blob_ids

    await until(has_left, "the chunk did not leave nvme")
    await coded.node.dram.delete(blob_ids)


async def is_in_nvme(coded: Coded, blob_id: BlobId) -> bool:
    return not await coded.node.nvme.missing([blob_id])


async def test_a_chunk_that_lies_coded_at_home_comes_back_from_the_remote_as_what_was_put(
    tmp_path: Path, shm_path: Path, remote: RemoteSettings
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}, remote=remote) as coded:
        key = await shared(coded, 1)
        assert coded.at_home(await coded.blob_id(key)) is not None
        await leave(coded, key)
        assert coded.at_home(await coded.blob_id(key)) is None
        answer = await coded.get(key)
        assert (answer.body, answer.headers["x-kvobj-tier"]) == (tensor(1), "remote")
        blob_id = await coded.blob_id(key)
        await until(lambda: is_in_nvme(coded, blob_id), "the chunk did not rise")
        await coded.node.read_tier.promotions_done()
        await coded.drop_from_memory(key)
        again = await coded.get(key)
        assert (again.body, again.headers["x-kvobj-tier"]) == (tensor(1), "nvme")


async def test_a_lossy_copy_goes_to_the_remote_as_it_lies_and_rises_as_it_lies(
    tmp_path: Path, shm_path: Path, remote: RemoteSettings, kvobj_remote: RemoteStore
) -> None:
    codec = lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True, remote=remote) as coded:
        key = await shared(coded, 2)
        copy = (await coded.row(key)).lossy
        assert isinstance(copy, LossyCopy)
        stored = [name for name in kvobj_remote.keys("store/") if copy.blob_id.hex() in name]
        assert len(stored) == 1
        body = kvobj_remote.read(stored[0])
        assert body is not None
        assert len(body) == copy.frame_bytes
        await leave(coded, key)
        await coded.drop_from_memory(key)
        answer = await coded.get(key, accept=f"{codec};max-error=1")
        assert (answer.status, answer.body) == (200, body)
        assert parse_tensor_frame(memoryview(body), len(body)).plain_bytes == copy.plain_bytes
        await until(lambda: is_in_nvme(coded, BlobId(copy.blob_id)), "the copy did not rise")
        assert coded.at_home(copy.blob_id) is not None
        decoded = await coded.get(key, accept="raw;max-error=1")
        assert blake3(decoded.body).digest() == copy.digest
        assert (await coded.get(key)).status == 404  # who takes no lossy copy still gets none


async def test_an_encoder_finds_nothing_to_ask_the_remote_for_where_a_chunk_is_in_memory(
    tmp_path: Path, shm_path: Path, remote: RemoteSettings
) -> None:
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossless()}, remote=remote) as coded:
        key = await coded.put(3)
        assert coded.node.remote is not None
        before = coded.node.remote.directory.totals
        answer = await coded.get(key, accept=f"{lossless()}, raw")
        assert answer.status == 200
        assert coded.node.remote.directory.totals == before == (0, 0)
