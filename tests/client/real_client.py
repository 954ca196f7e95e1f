"""A real server with a KV bucket, and clients of its root user."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from blake3 import blake3
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

from kvobj.client import Credentials, KvClient, Namespace
from kvobj.client.aio import AsyncKvClient
from kvobj.client.kv_values import ROOT

BUCKET: Final = "cache"
CHUNK_TOKENS: Final = 16
LAYERS: Final = 4
CHUNK_BYTES: Final = 2 * LAYERS * 8 * CHUNK_TOKENS * 2
TOKENS: Final = list(range(CHUNK_TOKENS * 6))
DECLARATION: Final[dict[str, object]] = {
    "model": "m",
    "chunk_tokens": CHUNK_TOKENS,
    "layout": {"kind": "kv", "dtype": "bf16", "layers": LAYERS, "kv_heads": 1, "head_dim": 8},
    "ids": "kvobj",
}


@contextmanager
def kv_server(directory: Path) -> Iterator[ServerProcess]:
    """A small server."""
    settings = ServerSettings(
        dram_bytes=160 * MIB, nvme_bytes=256 * MIB, buckets=(BucketSetting(BUCKET, kind="kv", durability="memory"),)
    )
    with ServerProcess(directory, settings) as running:
        yield running


def credentials_of(server: ServerProcess) -> Credentials:
    """The root user's."""
    keys = server.credentials()
    return Credentials(keys.access_key, keys.secret_key)


def client_of(server: ServerProcess, *, connections: int = 4, timeout_seconds: float = 20.0) -> KvClient:
    """A client, which the caller closes."""
    credentials = credentials_of(server)
    return KvClient(server.endpoint, credentials, BUCKET, connections=connections, timeout_seconds=timeout_seconds)


def async_client_of(
    server: ServerProcess, *, connections: int = 4, timeout_seconds: float = 20.0, same_host: bool = True
) -> AsyncKvClient:
    """The same for an event loop."""
    return AsyncKvClient(
        server.endpoint,
        credentials_of(server),
        BUCKET,
        connections=connections,
        timeout_seconds=timeout_seconds,
        same_host=same_host,
    )


def payload(name: bytes, size_bytes: int = CHUNK_BYTES) -> bytes:
    """What a chunk of this name holds."""
    return blake3(name).digest(length=size_bytes)


def bytes_of(data: bytearray | memoryview | None) -> bytes | None:
    """What was read, to be compared."""
    return None if data is None else bytes(data)


def put_chain(client: KvClient, namespace: Namespace, ids: list[bytes]) -> None:
    """Store a chain, chunk by chunk."""
    parent: bytes | str = ROOT
    for chunk_id in ids:
        client.put_chunk(chunk_id, payload(chunk_id), namespace=namespace, parent=parent)
        parent = chunk_id


def held_handles(server: ServerProcess) -> int:
    """How many extents all clients hold on the same-host path."""
    connection = socket.create_connection(("127.0.0.1", server.admin_port), 10)
    with connection, connection.makefile("rwb") as stream:
        stream.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        stream.flush()
        lines = stream.read().decode().splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("kvobj_same_host_handles "))
