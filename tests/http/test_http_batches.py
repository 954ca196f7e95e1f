"""?mput and ?mget over real sockets: streams of both directions whole, on one connection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from http_peers import Peer, serving
from kv_driver import JSON, KvDriver, kv_node, parse_stream, payload, stream
from s3_driver import sign


async def read_chunked(peer: Peer) -> bytes:
    body = b""
    while True:
        size = int(await asyncio.wait_for(peer.reader.readuntil(b"\r\n"), 20), 16)
        piece = await asyncio.wait_for(peer.reader.readexactly(size + 2), 20)
        if not size:
            return body
        body += piece[:-2]


async def test_batches_cross_a_socket_whole_and_the_connection_goes_on(tmp_path: Path, shm_path: Path) -> None:
    async with kv_node(tmp_path, shm_path, dram_mib=64) as kv:
        await cross(kv)


async def cross(kv: KvDriver) -> None:
    await kv.declare("engine", ids="foreign", layout={"kind": "opaque"})
    datas = {f"k{index}": payload(b"%d" % index, size) for index, size in enumerate((3 << 20, 10, 0, 70_000, 1 << 20))}
    stored = stream([({"id": key, "namespace": "engine"}, data) for key, data in datas.items()])
    asked = msgspec.json.encode({"namespace": "engine", "ids": [*datas, "absent"]})

    def request(target: str, body: bytes, kind: str) -> bytes:
        fields = sign("POST", target, body, headers={"content-type": kind})
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
        return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body

    async with serving(kv.driver.service.handle) as served:
        peer = await served.connect()
        await peer.send(request("/cache?mput", stored, "application/vnd.kvobj.stream"))
        answer = await peer.answer()
        assert (answer.status, b"error" in answer.body) == (200, False)
        for _ in range(2):
            await peer.send(request("/cache?mget", asked, JSON))
            head = await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n"), 20)
            assert b" 200 " in head
            assert b"transfer-encoding: chunked" in head
            items = parse_stream(await read_chunked(peer))
            assert [item.payload for item in items] == [*datas.values(), b""]
            assert [item.header["status"] for item in items] == [200] * 5 + [404]
    assert not len(kv.node.in_use)
