"""LMCache's connector for `lm://` (`connector/lm_connector.py`), as its remote backend drives it: one connection, one event loop.

Run in `.envs/engines`; see `command_lines` for how. Several connectors may be open, as several workers have one each.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import torch
from command_lines import body_of, digest_of, serve
from health_check import recovers
from lmcache.integration.vllm.utils import lmcache_get_or_create_config
from lmcache.v1.check.utils import _get_default_metadata, create_test_key
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

MODEL = "example/Model-8B"
SECONDS = 60.0

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
local = LocalCPUBackend(config=lmcache_get_or_create_config(), metadata=_get_default_metadata(MODEL), dst_device="cpu")
connectors: dict[str, Any] = {}
backends: dict[str, RemoteBackend] = {}


def wait_for(coroutine: Any) -> Any:  # noqa: ANN401 - whatever the connector's call returns
    """What a call of the connector came to."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(SECONDS)


def open_connector(name: str, port: int) -> None:
    """A new connection under this name."""
    connectors[name] = LMCServerConnector("127.0.0.1", port, loop, local)


def put(name: str, key: str, *, shape: list[int], dtype: str, fmt: str, seed: int) -> str:
    """Put a chunk of this form; a digest of its bytes. LMCache hears of nothing that goes wrong with it."""
    memory = local.allocate(torch.Size(shape), getattr(torch, dtype), MemoryFormat[fmt])
    assert memory is not None
    room = memoryview(memory.byte_array).cast("B")
    body = body_of(len(room), seed)
    room[:] = body
    wait_for(connectors[name].put(create_test_key(MODEL, key), memory))
    memory.ref_count_down()
    return digest_of(body)


def get(name: str, key: str) -> dict[str, Any] | None:
    """A chunk's form and a digest of its bytes; None for a miss."""
    memory = wait_for(connectors[name].get(create_test_key(MODEL, key)))
    if memory is None:
        return None
    told = {
        "shape": list(memory.get_shape()),
        "dtype": str(memory.get_dtype()).removeprefix("torch."),
        "fmt": memory.get_memory_format().name,
        "digest": digest_of(memoryview(memory.byte_array).cast("B")),
    }
    memory.ref_count_down()
    return told


def exists(name: str, key: str) -> bool:
    """Whether the server says that the chunk is there."""
    return bool(wait_for(connectors[name].exists(create_test_key(MODEL, key))))


def open_backend(name: str, port: int) -> None:
    """A new connection under this name, of a whole remote backend."""
    config = LMCacheEngineConfig.from_defaults(remote_url=f"lm://127.0.0.1:{port}", remote_serde="naive")
    backends[name] = RemoteBackend(config, _get_default_metadata(MODEL), loop, local, dst_device="cpu")


def backend_recovers(name: str, seed: int) -> bool:
    """See `health_check`."""
    return recovers(backends[name], seed)


def key_text(key: str) -> str:
    """What stands on the wire for the key."""
    return str(create_test_key(MODEL, key).to_string())


if __name__ == "__main__":
    serve(
        {
            "open": open_connector,
            "put": put,
            "get": get,
            "exists": exists,
            "key": key_text,
            "open_backend": open_backend,
            "backend_recovers": backend_recovers,
        }
    )
    os._exit(0)  # native threads end badly when Python takes itself down
