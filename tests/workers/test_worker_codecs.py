"""Chunks that lie coded, through worker processes: any worker gives the bytes that were put, and frames to who takes them."""

from __future__ import annotations

from pathlib import Path

from server_process import ServerProcess
from tier_codecs import CHUNK_BYTES, LAYER_BYTES, LAYOUT, TOKENS, lossless, tensor
from worker_server import worker_server

from kvobj.client import Credentials, KvClient

DECLARATION = {"model": "m", "chunk_tokens": TOKENS, "layout": LAYOUT, "ids": "kvobj"}


def client_of(server: ServerProcess) -> KvClient:
    keys = server.credentials()
    return KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "kept", same_host=False)


def test_what_lies_coded_at_home_is_read_through_any_worker(tmp_path: Path) -> None:
    codec = lossless()
    with worker_server(tmp_path) as server:
        with client_of(server) as client:
            namespace = client.declare_namespace("coded", {**DECLARATION, "codecs": {"nvme": codec}})
            names = namespace.chunk_ids([7] * (3 * TOKENS))
            parent: bytes | str = "root"
            for number, name in enumerate(names):
                client.put_chunk(name, tensor(number), namespace=namespace, parent=parent)
                parent = name
        assert server.terminate() == 0  # a clean stop forgets what memory had
        server.start()
        with client_of(server) as client:
            nvme = next(tier for tier in server.status()["tiers"] if tier["name"] == "nvme")
            (found,) = [each for each in nvme["codecs"] if each["codec"] == codec]
            assert (found["blobs"], found["plain_bytes"]) == (3, 3 * CHUNK_BYTES)
            frame = client.get_stored(names[0], namespace=namespace, accept=[codec, "raw"])
            assert frame is not None
            assert (frame.codec, frame.tier, frame.lossy) == (codec, "nvme", None)
            assert len(frame.data) < 0.8 * CHUNK_BYTES
            assert client.get_stored(names[0], namespace=namespace, accept=["f8"]) is None
            for _ in range(4):
                for number, name in enumerate(names):
                    assert bytes(client.get_chunk(name, namespace=namespace) or b"") == tensor(number)
            layers = client.get_chunk(names[1], namespace=namespace, layers=(2, 3))
            assert bytes(layers or b"") == tensor(1)[2 * LAYER_BYTES : 4 * LAYER_BYTES]
