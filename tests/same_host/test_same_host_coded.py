"""Chunks that lie coded, by shared memory: a client on the same host is given extents of plain bytes, never of coded frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from same_host_world import client_of, settings, wait_for_nothing_held
from server_process import ServerProcess, wait_until
from tier_codecs import CHUNK_BYTES, LAYER_BYTES, LAYOUT, TOKENS, lossless, tensor

CHUNKS = 44
DECLARATION = {"model": "m", "chunk_tokens": TOKENS, "layout": LAYOUT, "ids": "kvobj"}


def coded_in_memory(server: ServerProcess) -> int:
    """How many blobs lie coded in dram."""
    tiers: list[dict[str, Any]] = server.status()["tiers"]
    (dram,) = [tier for tier in tiers if tier["name"] == "dram"]
    return sum(each["blobs"] for each in dram["codecs"])


def test_views_of_chunks_that_lie_coded_in_memory_show_the_bytes_that_were_put(tmp_path: Path) -> None:
    with (
        # Memory is nearly full, so that chunks count as cold after half a second.
        ServerProcess(tmp_path, settings(dram_mib=32)) as server,
        client_of(server) as client,
    ):
        namespace = client.declare_namespace("coded", {**DECLARATION, "codecs": {"dram": lossless()}})
        names = namespace.chunk_ids(list(range(CHUNKS * TOKENS)))
        parent: bytes | str = "root"
        for number, name in enumerate(names):
            client.put_chunk(name, tensor(number % 4), namespace=namespace, parent=parent, durability="local")
            parent = name
        wait_until(lambda: coded_in_memory(server) >= CHUNKS // 2, timeout_seconds=30, what="coded chunks")
        shared = 0
        for number, name in enumerate(names):
            view = client.view_chunk(name, namespace=namespace)
            assert view is not None
            with view:
                shared += view.is_shared
                assert view.data == tensor(number % 4)
                assert view.check()
            room = bytearray(CHUNK_BYTES)
            assert bytes(client.get_chunk(name, namespace=namespace, into=room) or b"") == tensor(number % 4)
            layers = client.get_chunk(name, namespace=namespace, layers=(2, 3))
            assert bytes(layers or b"") == tensor(number % 4)[2 * LAYER_BYTES : 4 * LAYER_BYTES]
        assert client.is_same_host
        assert shared > CHUNKS // 2
        frame = client.get_stored(names[0], namespace=namespace, accept=[lossless(), "raw"])
        assert frame is not None
        assert frame.codec in {lossless(), "raw"}
        client.close()
        wait_for_nothing_held(server)
