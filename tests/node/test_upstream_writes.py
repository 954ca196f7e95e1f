"""Writes of class `shared` to a bucket with an upstream whose namespace is declared anew meanwhile: nothing of them goes there."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kv_driver import CHUNK_BYTES, KvDriver, Namespace, kv_node, payload
from s3_driver import Answer, Driver, FakeBody, MeanwhileBody, WallClock

from kvobj.api.exchange import S3Settings
from kvobj.api.service import S3Service
from kvobj.api.upstream_writes import UpstreamWrites
from kvobj.api.upstreams import Upstream, UpstreamChunks, UpstreamStore
from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.store.places import ChunkPlace
from kvobj.store.requests import PutResult
from kvobj.store.upstream.forwarding import Forwarded

SHARED = {"x-kvobj-durability": "shared"}


@dataclass
class Taken:
    """An upstream that takes everything. `put`: the key, the root of the namespace, and the bytes, of each."""

    put: list[tuple[str, bytes, bytes]] = field(default_factory=list)

    def check(self, size_bytes: int) -> None:
        """There is always room."""

    @asynccontextmanager
    async def room(self, _: int) -> AsyncIterator[None]:
        yield

    async def put_one(self, row: ObjectRow, place: ChunkPlace, data: memoryview) -> Forwarded:
        self.put.append((row.key, place.namespace_root, bytes(data)))
        return Forwarded(existed=False, durability=Durability.SHARED, digest=None)

    async def put_all(
        self,
        chunks: Sequence[tuple[ObjectRow, ChunkPlace]],
        append_bytes: Callable[[ObjectRow, bytearray], Awaitable[None]],
    ) -> list[Forwarded]:
        answers = []
        for row, place in chunks:
            data = bytearray()
            await append_bytes(row, data)
            answers.append(await self.put_one(row, place, memoryview(data)))
        return answers


@dataclass
class Near:
    """A node whose bucket `cache` has an upstream."""

    kv: KvDriver
    driver: Driver
    taken: Taken

    async def declare_anew(self) -> None:
        """The namespace goes, and comes again under its name with another key."""
        assert (await self.kv.call("DELETE", "namespace=n")).status == 200
        await self.kv.declare("n", part_axis="layer", access={"bob": "write"})

    async def put(self, target: str, data: bytes | FakeBody, method: str = "PUT", **headers: str) -> Answer:
        named = SHARED | {"x-kvobj-namespace": "n", "x-kvobj-parent": "root"}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        payload = "UNSIGNED-PAYLOAD" if isinstance(data, FakeBody) else None
        return await self.driver.request(method, f"/cache{target}", body=data, headers=named, payload=payload)


@pytest.fixture
async def near(tmp_path: Path, shm_path: Path) -> AsyncIterator[Near]:
    async with kv_node(tmp_path, shm_path) as kv:
        assert kv.chunks is not None
        taken = Taken()
        client = SimpleNamespace(
            via=SimpleNamespace(is_at_end=False), is_down=True, settings=SimpleNamespace(timeout_seconds=1.0)
        )
        forwarder = SimpleNamespace(check=taken.check, room=taken.room, put=taken.put_one)
        store: Any = kv.node.store
        writes = UpstreamWrites(
            cast("Any", client), cast("Any", forwarder), cast("Any", taken), store=store, has_remote=False
        )
        upstreams = {
            "cache": Upstream(cast("Any", client), cast("Any", None), cast("Any", None), cast("Any", None), writes)
        }
        fronted = UpstreamStore(store, upstreams).as_store()
        driver = Driver(store=fronted)
        driver.service = S3Service(
            fronted,
            S3Settings(upstream_buckets=frozenset({"cache"})),
            clock=WallClock(),
            log=logging.getLogger("test"),
            chunks=UpstreamChunks(kv.chunks, fronted, upstreams).as_chunks(),
            executor=kv.node.hash_executor,
        )
        yield Near(kv, driver, taken)


def first_of(namespace: Namespace) -> tuple[str, bytes]:
    """Key and bytes of a chain's first chunk."""
    (chunk_id,) = namespace.ids(list(range(16)))
    return chunk_id.hex(), payload(chunk_id)


@pytest.mark.parametrize("anew", [False, True])
async def test_an_upload_whose_namespace_is_declared_anew_as_it_is_completed_is_not_forwarded(
    near: Near, monkeypatch: pytest.MonkeyPatch, *, anew: bool
) -> None:
    namespace = await near.kv.declare("n", part_axis="layer")
    key, data = first_of(namespace)
    begun = await near.put(f"/{key}?uploads", b"", method="POST")
    upload_id = begun.xml.findtext("UploadId")
    part = await near.put(f"/{key}?partNumber=1&uploadId={upload_id}", data)
    document = (
        f"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>{part.headers['etag']}</ETag></Part>"
        "</CompleteMultipartUpload>"
    ).encode()
    store = near.kv.node.store
    complete: Callable[..., Awaitable[PutResult]] = store.complete_upload

    async def complete_early(*arguments: object, **named: object) -> PutResult:
        result = await complete(*arguments, **named)
        if anew:
            await near.declare_anew()
        return result

    monkeypatch.setattr(store, "complete_upload", complete_early)
    done = await near.put(f"/{key}?uploadId={upload_id}", document, method="POST")
    if anew:
        assert (done.status, done.code) == (404, "NoSuchNamespace")
        assert near.taken.put == []
    else:
        assert (done.status, done.headers["x-kvobj-durability"]) == (200, "shared")
        assert near.taken.put == [(key, namespace.root, data)]


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("form", ["whole", "parts"])
async def test_a_chunk_whose_namespace_is_declared_anew_while_it_arrives_is_not_forwarded(
    near: Near, form: str, *, anew: bool
) -> None:
    namespace = await near.kv.declare("n", part_axis="layer")
    key, data = first_of(namespace)

    async def meanwhile() -> None:
        if anew:
            await near.declare_anew()

    if form == "whole":
        last = await near.put(f"/{key}", MeanwhileBody(data, meanwhile))
    else:
        parts = {"x_kvobj_part": "0/2", "x_kvobj_tokens": "16"}
        assert (await near.put(f"/{key}", data[: CHUNK_BYTES // 2], **parts)).status == 200
        parts["x_kvobj_part"] = "1/2"
        last = await near.put(f"/{key}", MeanwhileBody(data[CHUNK_BYTES // 2 :], meanwhile), **parts)
    if anew:
        assert last.status == 404
        assert near.taken.put == []
    else:
        assert (last.status, last.headers["x-kvobj-durability"]) == (200, "shared")
        assert near.taken.put == [(key, namespace.root, data)]
