"""Calls of the KV API over a whole node, signed as any request: documents in both formats, streams, chains to put and match."""

from __future__ import annotations

import logging
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3
from real_store import node_settings, running_node
from s3_driver import ALICE, Answer, Driver, FakeBody, WallClock

from kvobj.api.exchange import S3Settings
from kvobj.api.service import S3Service
from kvobj.app.kv_api import make_kv_api
from kvobj.app.node import Node
from kvobj.catalog.rows import ObjectRow, UserRow
from kvobj.clock import SystemClock, boot_ms
from kvobj.config.settings import RemoteSettings
from kvobj.gc.pacing import Pace
from kvobj.store.chunks import ChunkStore
from kvobj.store.request_feed import RequestTrace

JSON, MSGPACK = "application/json", "application/msgpack"
FORMATS = (JSON, MSGPACK)
STREAM = "application/vnd.kvobj.stream"
CHUNK_TOKENS, LAYERS = 16, 4
CHUNK_BYTES = 2 * LAYERS * 8 * CHUNK_TOKENS * 2


def declaration(**fields: object) -> dict[str, object]:
    """A small tensor namespace: 2,048 bytes a chunk of 16 tokens and 4 layers."""
    layout = {"kind": "kv", "dtype": "bf16", "layers": LAYERS, "kv_heads": 1, "head_dim": 8}
    return {"model": "m", "chunk_tokens": CHUNK_TOKENS, "layout": layout, "ids": "kvobj", **fields}


@dataclass
class KvAnswer:
    """A reply with its document."""

    answer: Answer
    value: Any

    @property
    def status(self) -> int:
        return self.answer.status

    @property
    def code(self) -> str | None:
        return self.value["error"]["code"] if isinstance(self.value, dict) and "error" in self.value else None

    @property
    def detail(self) -> dict[str, Any]:
        detail: dict[str, Any] = self.value["error"]["detail"]
        return detail


@dataclass
class Item:
    """One item of a stream."""

    header: dict[str, Any]
    payload: bytes = b""


@dataclass
class Namespace:
    """A declared namespace as its users know it."""

    name: str
    key: bytes
    root: bytes

    def ids(self, tokens: Sequence[int], chunk_tokens: int = CHUNK_TOKENS) -> list[bytes]:
        """Chunk ids, computed from the published rule and not by the code under test."""
        ids, parent = [], self.root
        for start in range(0, len(tokens), chunk_tokens):
            span = struct.pack(f"<{len(tokens[start : start + chunk_tokens])}I", *tokens[start : start + chunk_tokens])
            parent = blake3(parent + span, key=self.key).digest()
            ids.append(parent)
        return ids


class TurnedClock(SystemClock):
    """The machine's clock, which a test can turn on."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_ms / 1000


@dataclass
class KvDriver:
    """A node, its service with the KV API, and what the policy was told."""

    node: Node
    driver: Driver
    clock: TurnedClock
    requests: list[RequestTrace] = field(default_factory=list)
    pace: Pace | None = None
    waits: list[float] = field(default_factory=list)
    """What removals waited beside requests, at a rate of 20 chunks a second; nobody really waits."""
    chunks: ChunkStore | None = None

    def turn(self, milliseconds: int) -> None:
        """Let time pass for leases."""
        self.clock.ahead_ms += milliseconds

    def now_boot_ms(self) -> int:
        return boot_ms(self.clock)

    async def call(
        self,
        method: str,
        query: str,
        value: object = None,
        *,
        form: str = JSON,
        accept: str | None = None,
        user: UserRow = ALICE,
        bucket: str = "cache",
        raw: bytes | None = None,
    ) -> KvAnswer:
        """One call with a document. `raw`: exactly these bytes as the document."""
        body = b""
        headers = {"content-type": form} if method != "GET" else {"accept": form}
        if accept is not None:
            headers["accept"] = accept
        if raw is not None:
            body = raw
        elif value is not None:
            body = msgspec.msgpack.encode(value) if form == MSGPACK else msgspec.json.encode(plain(value))
        answer = await self.driver.request(method, f"/{bucket}?{query}", body=body, headers=headers, user=user)
        kind = answer.headers.get("content-type")
        decoded = None
        if kind == MSGPACK:
            decoded = msgspec.msgpack.decode(answer.body)
        elif kind == JSON:
            decoded = msgspec.json.decode(answer.body)
        return KvAnswer(answer, decoded)

    async def declare(self, name: str, *, user: UserRow = ALICE, **fields: object) -> Namespace:
        answer = await self.call("PUT", f"namespace={name}", declaration(**fields), user=user, form=MSGPACK)
        assert answer.status == 200, answer.value
        return Namespace(name, answer.value["key"], answer.value["root"])

    async def put(
        self, key: str, data: bytes, *, user: UserRow = ALICE, bucket: str = "cache", **headers: str
    ) -> Answer:
        named = {f"x-kvobj-{name}": value for name, value in headers.items()}
        return await self.driver.request("PUT", f"/{bucket}/{key}", body=data, headers=named, user=user)

    async def put_chain(
        self, namespace: Namespace, ids: Sequence[bytes], *, parent: str = "root", last_tokens: int | None = None
    ) -> None:
        """Put chunks one after the other, each under the one before."""
        for index, chunk_id in enumerate(ids):
            is_short = last_tokens is not None and index == len(ids) - 1
            headers = {"namespace": namespace.name, "parent": parent}
            if is_short:
                headers["tokens"] = str(last_tokens)
            data = payload(chunk_id, CHUNK_BYTES * (last_tokens or 0) // CHUNK_TOKENS if is_short else CHUNK_BYTES)
            answer = await self.put(chunk_id.hex(), data, user=ALICE, bucket="cache", **headers)
            assert answer.status == 200, answer.body
            parent = chunk_id.hex()

    async def match(self, namespace: str | None = None, *, form: str = JSON, **fields: object) -> KvAnswer:
        value = fields if namespace is None else {"namespace": namespace, **fields}
        return await self.call("POST", "match", value, form=form)

    async def open_session(self, *, user: UserRow = ALICE, form: str = JSON, ttl_ms: int = 30_000) -> Any:  # noqa: ANN401 - hex or bytes
        answer = await self.call("POST", "sessions", {"holder": "test", "ttl_ms": ttl_ms}, user=user, form=form)
        assert answer.status == 200, answer.value
        return answer.value["session"]

    async def mget(self, value: object, *, form: str = JSON, user: UserRow = ALICE) -> tuple[Answer, list[Item]]:
        answer = (await self.call("POST", "mget", value, form=form, user=user)).answer
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"] == STREAM
        return answer, parse_stream(answer.body)

    async def mput(
        self,
        body: FakeBody | bytes,
        *,
        form: str = JSON,
        user: UserRow = ALICE,
        payload_hash: str | None = None,
        **headers: str,
    ) -> KvAnswer:
        named = {"content-type": STREAM, "accept": form, **{k.replace("_", "-"): v for k, v in headers.items()}}
        answer = await self.driver.request(
            "POST", "/cache?mput", body=body, headers=named, user=user, payload=payload_hash
        )
        decode: Callable[[bytes], Any] = msgspec.msgpack.decode if form == MSGPACK else msgspec.json.decode
        return KvAnswer(answer, decode(answer.body))


def plain(value: object) -> object:
    """A value as JSON has it: bytes in hex, a run of ids as a list."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def ids_in(form: str, ids: Sequence[bytes]) -> object:
    """A list of ids as the format has it."""
    return b"".join(ids) if form == MSGPACK else [each.hex() for each in ids]


def tokens_in(form: str, tokens: Sequence[int]) -> object:
    """Token ids as the format has them."""
    return struct.pack(f"<{len(tokens)}I", *tokens) if form == MSGPACK else list(tokens)


def payload(name: bytes, size_bytes: int = CHUNK_BYTES) -> bytes:
    """Bytes that only this chunk has."""
    return blake3(name).digest(length=size_bytes) if size_bytes else b""


def framed(header: dict[str, object], data: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return struct.pack("<I", len(encoded)) + encoded + data


def stream(items: Sequence[tuple[dict[str, object], bytes]], *, count: int | None = None) -> bytes:
    """A whole stream of chunks to put."""
    body = b"".join(
        framed({"i": index, "size_bytes": len(data), **header}, data) for index, (header, data) in enumerate(items)
    )
    return body + framed({"end": True, "items": len(items) if count is None else count})


def chain_stream(namespace: Namespace, ids: Sequence[bytes], *, parent: object = "root") -> bytes:
    """A chain's chunks as one stream."""
    items: list[tuple[dict[str, object], bytes]] = []
    for chunk_id in ids:
        items.append(({"id": chunk_id, "parent": parent, "namespace": namespace.name}, payload(chunk_id)))
        parent = chunk_id
    return stream(items)


def parse_stream(body: bytes) -> list[Item]:
    """The items of a stream; its end must be there and count them."""
    items: list[Item] = []
    position = 0
    while True:
        (length,) = struct.unpack_from("<I", body, position)
        position += 4
        header = msgspec.msgpack.decode(body[position : position + length])
        position += length
        if header.get("end"):
            assert header == {"end": True, "items": len(items)}
            assert position == len(body)
            return items
        items.append(Item(header, body[position : position + header["size_bytes"]]))
        assert len(items[-1].payload) == header["size_bytes"]
        position += header["size_bytes"]


@asynccontextmanager
async def kv_node(
    data: Path, memory: Path, *, dram_mib: int = 16, remote: RemoteSettings | None = None
) -> AsyncIterator[KvDriver]:
    """A node with Alice's KV bucket `cache` and her ordinary bucket `files`. Small, since populating an arena is what costs."""
    settings = replace(node_settings(data, memory, dram_mib=dram_mib, nvme_mib=64), remote=remote)
    async with running_node(settings) as node:
        clock = TurnedClock()
        waits: list[float] = []

        async def wait(seconds: float) -> None:
            waits.append(seconds)

        pace = Pace(clock, chunks_per_second=20, sleep=wait)
        api = make_kv_api(
            node.settings,
            catalog=node.catalog,
            store=node.store,
            store_key=node.data.store_key,
            policy=node.policy,
            dram=node.dram,
            coded_blobs=node.coded_blobs,
            lossy=node.lossy,
            in_use=node.in_use,
            arena_bytes=node.arena.capacity_bytes,
            executor=node.hash_executor,
            hold=lambda _: None,
            on_removed=lambda _: None,
            clock=clock,
            pace=pace,
            on_namespace_changed=lambda _: node.home_demotion.look(),
            check_profile=node.profiles.check,
        )
        requests: list[RequestTrace] = []
        api.chunks._on_request = requests.append
        driver = Driver(store=node.store)
        driver.service = S3Service(
            node.store,
            S3Settings(),
            clock=WallClock(),
            log=logging.getLogger("test"),
            chunks=api.chunks,
            read_events=api.events.stream,
            executor=node.hash_executor,
        )
        created = await driver.request("PUT", "/cache", headers={"x-kvobj-bucket-kind": "kv"})
        assert created.status == 200
        assert (await driver.request("PUT", "/files")).status == 200
        yield KvDriver(node, driver, clock, requests, pace, waits, api.chunks)


async def rows(kv: KvDriver, bucket: str = "cache") -> list[ObjectRow]:
    """All that stands in the catalog."""
    return [row async for row in kv.node.catalog.scan_objects() if row.bucket == bucket]
