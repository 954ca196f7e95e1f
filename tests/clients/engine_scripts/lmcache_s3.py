"""LMCache's S3 adapter (`l2_adapters/s3_l2_adapter.py`, on awscrt) as LMCache's server drives it, and its `bench l2`.

Run in `.envs/engines`; see `command_lines` for how. A key is [hash in hex, cache salt]; objects are host memory as in LMCache.
"""

from __future__ import annotations

import contextlib
import io
import json
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from command_lines import body_of, digest_of, serve
from lmcache.cli.main import main
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.s3_l2_adapter import S3L2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

Key: TypeAlias = tuple[str, str]

TASK_SECONDS = 60.0
MODEL = "example/Model-8B"
adapters: dict[str, Any] = {}


def open_adapter(name: str, settings: dict[str, Any]) -> None:
    """A new adapter, which remembers nothing, in the place of one of the same name; `settings` as in `--l2-adapter`."""
    if name in adapters:
        adapters.pop(name).close()
    adapters[name] = create_l2_adapter(S3L2AdapterConfig.from_dict(settings))


def object_keys(keys: list[Key]) -> list[Any]:
    """LMCache's own keys, which become `MODEL@rank@group@hash[@salt]`."""
    return [
        ObjectKey(chunk_hash=bytes.fromhex(chunk_hash), model_name=MODEL, kv_rank=1, cache_salt=salt)
        for chunk_hash, salt in keys
    ]


def memory_of(size_bytes: int, body: bytes | None = None) -> Any:  # noqa: ANN401 - LMCache's class
    """Host memory of one chunk, filled with the body or with a pattern that no test stores."""
    tensor = torch.empty(size_bytes, dtype=torch.uint8)
    if body is None:
        tensor.fill_(0xA5)
    else:
        tensor.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
    metadata = MemoryObjMetadata(
        shape=torch.Size([size_bytes]),
        dtype=torch.uint8,
        address=0,
        phy_size=size_bytes,
        fmt=MemoryFormat.KV_2LTD,
        ref_count=1,
    )
    return TensorMemoryObj(raw_data=tensor, metadata=metadata, parent_allocator=None)


def wait_for(descriptor: int, result: Callable[[], Any]) -> Any:  # noqa: ANN401 - each kind of task has its own result
    """What a task came to, once its event says so."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if not poller.poll(TASK_SECONDS * 1000):
        raise TimeoutError("no task ended")
    consume_fd(descriptor)
    return result()


def store(name: str, objects: list[tuple[Key, int, int]]) -> bool:
    """Store (key, size in bytes, seed) each; whether the adapter says that all are there."""
    adapter = adapters[name]
    memory = [memory_of(size, body_of(size, seed)) for _key, size, seed in objects]
    task = adapter.submit_store_task(object_keys([key for key, _size, _seed in objects]), memory)
    results = wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    return bool(results[task].is_successful())


def look_up(name: str, keys: list[Key]) -> list[bool]:
    """Which of the keys the adapter takes for stored: from its own memory, else by one HEAD each."""
    adapter = adapters[name]
    wanted = object_keys(keys)
    task = adapter.submit_lookup_and_lock_task(wanted, {0: MemoryLayoutDesc(shapes=[], dtypes=[])})
    found = wait_for(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    adapter.submit_unlock(wanted)
    return [bool(found.test(position)) for position in range(len(keys))]


def load(name: str, objects: list[tuple[Key, int]]) -> dict[str, Any]:
    """Load (key, size in bytes) each: a digest of each that came, None for a miss, and the seconds that it took."""
    adapter = adapters[name]
    memory = [memory_of(size) for _key, size in objects]
    began = time.monotonic()
    task = adapter.submit_load_task(object_keys([key for key, _size in objects]), memory)
    came = wait_for(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
    seconds = time.monotonic() - began
    digests = [
        digest_of(bytes(piece.byte_array)) if came.test(position) else None for position, piece in enumerate(memory)
    ]
    return {"digests": digests, "seconds": seconds}


def delete(name: str, keys: list[Key]) -> None:
    """Delete as LMCache's own eviction does."""
    adapters[name].delete(object_keys(keys))


def list_keys(name: str, page_size: int) -> list[list[tuple[str, int]]]:
    """(hash in hex, size) of every key of the model, by pages as they came."""
    pages: list[list[tuple[str, int]]] = []
    cursor = None
    while True:
        page = adapters[name].list_l2_keys(MODEL, page_size, cursor)
        pages.append([(str(entry.key.chunk_hash_hex), entry.size_bytes) for entry in page.entries])
        cursor = page.next_page_token
        if cursor is None:
            return pages


def status(name: str) -> dict[str, Any]:
    """The adapter's own account: whether it is healthy, and how many connections failed in a row."""
    told = adapters[name].report_status()
    return {key: told[key] for key in ("is_healthy", "connection_failures", "connection_disabled")}


def bench(arguments: list[str], output: str) -> dict[str, Any]:
    """One `lmcache bench l2`: its exit status, what it printed, and what it wrote to `output`."""
    printed, exit_status = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(["bench", "l2", *arguments, "--format", "json", "--output", output])
        except SystemExit as left:
            exit_status = int(left.code or 0)
    report = json.loads(Path(output).read_text()) if Path(output).exists() else {}
    return {"exit_status": exit_status, "printed": printed.getvalue(), "report": report}


if __name__ == "__main__":
    serve(
        {
            "open": open_adapter,
            "store": store,
            "look_up": look_up,
            "load": load,
            "delete": delete,
            "list": list_keys,
            "status": status,
            "bench": bench,
        }
    )
