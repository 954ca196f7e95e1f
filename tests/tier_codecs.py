"""Chunks whose namespaces say how tiers hold them: tensors to put, and what a test asks a node about where they lie.

Tensor codecs need the CPU kernels, which a machine without a compiler lacks; `zp` is always there. Where it does not matter how a
chunk is coded, tests say `zp`, so that they hold on any machine.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import pytest
from kv_driver import KvDriver, Namespace, kv_node
from s3_driver import Answer

from kvobj.app.node import flush
from kvobj.catalog.rows import ObjectRow
from kvobj.config.settings import RemoteSettings
from kvobj.ids import BlobId
from kvobj.tensors.codecs import unavailable
from kvobj.tiers.coded_blobs import CodedBlob

LAYERS, HEADS, DIM, TOKENS = 8, 4, 64, 64
LAYER_BYTES = 2 * HEADS * DIM * TOKENS * 2
CHUNK_BYTES = LAYERS * LAYER_BYTES
LAYOUT = {"kind": "kv", "dtype": "bf16", "layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM}


def usable(codec: str) -> bool:
    """Whether this machine can encode so."""
    return unavailable(codec) is None


def lossless() -> str:
    """A lossless codec that works here: a tensor codec where there is one."""
    return next((codec for codec in ("x3", "xa") if usable(codec)), "zp")


@cache
def tensor(seed: int, size_bytes: int = CHUNK_BYTES) -> bytes:
    """Values as KV caches have them, in bf16: Gaussian, so that sign and mantissa are noise and the exponent is not."""
    rng = random.Random(seed)
    block = [struct.unpack("<HH", struct.pack("<f", rng.gauss(0.0, 1.0)))[1] for _ in range(4096)]
    rows = []
    for _ in range(size_bytes // 8192 + 1):
        rng.shuffle(block)
        rows.append(struct.pack("<4096H", *block))
    return b"".join(rows)[:size_bytes]


async def wait_for(condition: Callable[[], bool], *, timeout_seconds: float = 20.0) -> None:
    """Until it is so."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


class Coded:
    """One namespace of a node, whose chunks are roots of chains of one."""

    def __init__(self, kv: KvDriver, namespace: Namespace) -> None:
        self.kv = kv
        self.node = kv.node
        self.namespace = namespace

    def key(self, number: int) -> str:
        return self.namespace.ids([number] * TOKENS, TOKENS)[0].hex()

    async def put(self, number: int, *, durability: str = "memory", data: bytes | None = None) -> str:
        """Put chunk `number`; its key."""
        key = self.key(number)
        answer = await self.kv.put(
            key,
            tensor(number) if data is None else data,
            namespace=self.namespace.name,
            parent="root",
            durability=durability,
        )
        assert answer.status == 200, answer.body
        assert answer.headers["x-kvobj-durability"] == durability
        return key

    async def get(self, key: str, query: str = "", **headers: str) -> Answer:
        named = {f"x-kvobj-{name}": value for name, value in headers.items()}
        return await self.kv.driver.request("GET", f"/cache/{key}{query}", headers=named)

    async def row(self, key: str) -> ObjectRow:
        (row,) = await self.node.catalog.lookup("cache", [key])
        assert row is not None
        return row

    async def blob_id(self, key: str) -> BlobId:
        return BlobId((await self.row(key)).blobs[0].blob_id)

    async def written(self, key: str) -> CodedBlob | None:
        """Write down what is only in memory; how the chunk lies in the home tier."""
        assert await flush(self.node, timeout_seconds=20.0)
        return self.at_home(await self.blob_id(key))

    def at_home(self, blob_id: bytes) -> CodedBlob | None:
        return self.node.coded_blobs.find(blob_id)

    async def drop_from_memory(self, key: str) -> None:
        """As eviction does."""
        await self.node.dram.delete([await self.blob_id(key)])

    async def code_in_memory(self, key: str) -> None:
        """What happens when nobody has asked for the chunk in a while."""
        row = await self.row(key)
        coding = await self.node.coding_rules.of_row(row, "dram")
        assert coding is not None
        assert await self.node.dram_transcoding.code(BlobId(row.blobs[0].blob_id), coding)


@asynccontextmanager
async def coded_node(
    data: Path,
    memory: Path,
    *,
    codecs: dict[str, str],
    lossy: bool = False,
    dram_mib: int = 16,
    remote: RemoteSettings | None = None,
) -> AsyncIterator[Coded]:
    """A node with a namespace `n` of these settings."""
    async with kv_node(data, memory, dram_mib=dram_mib, remote=remote) as kv:
        namespace = await kv.declare("n", layout=LAYOUT, chunk_tokens=TOKENS, codecs=codecs, lossy=lossy)
        yield Coded(kv, namespace)


def lossy() -> str:
    """A lossy codec that works here."""
    found = next((codec for codec in ("eq4", "f8", "h4") if usable(codec)), None)
    if found is None:
        pytest.skip("no lossy codec is usable on this machine: its kernels are not built")
    return found


def furthest(decoded: bytes, original: bytes) -> float:
    """How far off the furthest of two tensors' values is."""

    def values(data: bytes) -> tuple[float, ...]:
        words = struct.unpack(f"<{len(data) // 2}H", data)
        return struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *[word << 16 for word in words]))

    return max(abs(one - other) for one, other in zip(values(decoded), values(original), strict=True))
