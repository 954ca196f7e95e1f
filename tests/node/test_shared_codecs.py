"""Chunks with tensor codecs on the remote tier: they lie there as they lie at home, and class `shared` keeps the very bytes."""

from __future__ import annotations

from pathlib import Path

from remote_servers import RemoteStore
from tier_codecs import Coded, coded_node, lossless, lossy, tensor

from kvobj.app.node import flush
from kvobj.catalog.rows import Durability
from kvobj.catalog.setting_rows import BucketUpdate, RemoteRule
from kvobj.ids import BlobId


async def only_on_the_remote(coded: Coded, key: str) -> None:
    """Take the chunk's bytes from memory and from home, as eviction does."""
    row = await coded.row(key)
    assert row.durability is Durability.SHARED
    await coded.drop_from_memory(key)
    await coded.node.nvme.delete([BlobId(blob_id) for blob_id in row.blob_ids])


async def test_a_chunk_that_lies_coded_at_home_is_coded_on_the_remote(
    tmp_path: Path, shm_path: Path, kvobj_remote: RemoteStore
) -> None:
    codec = lossless()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, remote=kvobj_remote.settings()) as coded:
        key = await coded.put(1, durability="shared")
        (name,) = kvobj_remote.keys(f"{kvobj_remote.prefix}blobs/")
        assert f"~{codec}" in name
        await only_on_the_remote(coded, key)
        answer = await coded.get(key)
        assert (answer.body, answer.headers["x-kvobj-tier"]) == (tensor(1), "remote")


async def test_class_shared_promises_bytes_where_a_namespace_allows_lossy_copies(
    tmp_path: Path, shm_path: Path, kvobj_remote: RemoteStore
) -> None:
    remote = kvobj_remote.settings()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": lossy()}, lossy=True, remote=remote) as coded:
        key = await coded.put(2)
        assert (await coded.row(key)).durability is Durability.MEMORY
        again = await coded.put(2, durability="shared")
        assert again == key
        row = await coded.row(key)
        assert (row.durability, row.lossy) == (Durability.SHARED, None)
        await only_on_the_remote(coded, key)
        assert (await coded.get(key)).body == tensor(2)


async def test_a_lossy_copy_is_what_goes_to_the_remote_by_rule(
    tmp_path: Path, shm_path: Path, kvobj_remote: RemoteStore
) -> None:
    remote, codec = kvobj_remote.settings(), lossy()
    async with coded_node(tmp_path, shm_path, codecs={"nvme": codec}, lossy=True, remote=remote) as coded:
        node = coded.node
        await node.catalog.update_bucket("cache", BucketUpdate(remote=RemoteRule.ALWAYS))
        key = await coded.put(3)
        assert await flush(node, timeout_seconds=20)
        assert node.writing is not None
        assert await node.writing.uploads.flush(timeout_seconds=20)
        row = await coded.row(key)
        assert row.lossy is not None
        (name,) = kvobj_remote.keys(f"{kvobj_remote.prefix}blobs/")
        assert row.lossy.blob_id.hex() in name
        at_home = await coded.get(key, accept=f"{codec};max-error=1")
        await only_on_the_remote(coded, key)
        answer = await coded.get(key, accept=f"{codec};max-error=1")
        assert (answer.status, answer.body) == (200, at_home.body)
        assert (await coded.get(key)).status == 404
        assert await coded.row(key) == row
