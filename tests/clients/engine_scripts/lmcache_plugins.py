"""kvobj's plug-ins in the real LMCache: its L2 adapter as the multi-process server drives it, and its connector as an engine does.

Run in `.envs/engines` with kvobj on PYTHONPATH; see `command_lines` for how. L2 keys and objects are those of `lmcache_s3`.
An engine's chunk is [hash, tokens, seed], and of one layer [hash, tokens, seed, layer].
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import lmcache_s3 as l2
import torch
from command_lines import body_of, digest_of, serve
from health_check import is_well, recovers
from lmcache.utils import CacheEngineKey, LayerCacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend import CreateStorageBackends
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

Chunk: TypeAlias = list[int]

PLUGIN = {"module_path": "kvobj.connectors.lmcache", "class_name": "KvobjL2Adapter"}
ADAPTER = {"module_path": "kvobj.connectors.lmcache", "class_name": "KvobjConnectorAdapter"}
LAYERS, HEADS, HEAD_SIZE, CHUNK_TOKENS = 2, 2, 8, 16
MODEL = "/models/Example-8B"
MODELS = (l2.MODEL, MODEL)
WAIT_SECONDS = 30.0

arenas: list[torch.Tensor] = []
backends: dict[str, RemoteBackend] = {}
kept: list[Any] = []
underway: set[CacheEngineKey] = set()
loop = asyncio.new_event_loop()


def call_model(model: str | None) -> None:
    """What the model of all keys is called from now on; None: as at first."""
    global MODEL
    l2.MODEL, MODEL = (model, model) if model else MODELS


# -- the multi-process server's adapter --------------------------------------------------------------------------
def open_adapter(name: str, params: dict[str, Any], arena_bytes: int = 0) -> None:
    """A new adapter in the place of one of the same name; with an arena that it is told of where `arena_bytes` are asked for."""
    if name in l2.adapters:
        l2.adapters.pop(name).close()
    described = None
    if arena_bytes:
        arenas.append(torch.zeros(arena_bytes, dtype=torch.uint8))
        described = L1MemoryDesc(ptr=arenas[-1].data_ptr(), size=arena_bytes, align_bytes=1)
    config = PluginL2AdapterConfig.from_dict({**PLUGIN, "adapter_params": params})
    l2.adapters[name] = create_l2_adapter(config, described)


def lock(name: str, keys: list[l2.Key]) -> list[bool]:
    """Which are found; those are locked until they are unlocked."""
    adapter = l2.adapters[name]
    task = adapter.submit_lookup_and_lock_task(l2.object_keys(keys), {0: MemoryLayoutDesc(shapes=[], dtypes=[])})
    descriptor = adapter.get_lookup_and_lock_event_fd()
    found = l2.wait_for(descriptor, lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None, "a result is given once"
    return [bool(found.test(position)) for position in range(len(keys))]


def unlock(name: str, keys: list[l2.Key]) -> None:
    """Unlock what `lock` found, and what it did not."""
    l2.adapters[name].submit_unlock(l2.object_keys(keys))


def store_result(name: str, objects: list[tuple[l2.Key, int, int]]) -> list[Any]:
    """Whether a store's task succeeded, and the bytes that it says are new."""
    adapter = l2.adapters[name]
    memory = [l2.memory_of(size, body_of(size, seed)) for _key, size, seed in objects]
    task = adapter.submit_store_task(l2.object_keys([key for key, _size, _seed in objects]), memory)
    result = l2.wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)[task]
    return [bool(result.is_successful()), int(result.bytes_transferred())]


def adapter_state(name: str) -> dict[str, Any]:
    """The adapter's own account, its usage, and whether its descriptors are three."""
    adapter = l2.adapters[name]
    usage = adapter.get_usage()
    descriptors = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    return {
        "status": adapter.report_status(),
        "used_bytes": usage.total_bytes_used,
        "by_salt": dict(usage.bytes_by_cache_salt),
        "descriptors": len(descriptors),
    }


def list_behind(name: str, cursor: str) -> int:
    """How many keys a page behind this cursor has."""
    return len(l2.adapters[name].list_l2_keys(None, 5, cursor).entries)


def close_adapter(name: str) -> None:
    """Close it twice, with a task behind it."""
    adapter = l2.adapters.pop(name)
    adapter.close()
    adapter.close()


# -- the engine's connector --------------------------------------------------------------------------------------
def open_engine(
    name: str,
    params: dict[str, Any],
    *,
    scheduler: bool = False,
    layerwise: bool = False,
    mla_rank: int | None = None,
    memory_mib: int = 64,
    timeout_seconds: int = 10,
) -> bool:
    """An engine's remote backend of the plug-in `kvobj`, as LMCache makes it: whether it has a connection."""
    extra: dict[str, Any] = {f"remote_storage_plugin.kvobj.{field}": value for field, value in ADAPTER.items()}
    extra |= {f"remote_storage_plugin.kvobj.{field}": value for field, value in params.items()}
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS,
        local_cpu=True,
        max_local_cpu_size=memory_mib / 1024,
        remote_serde="naive",
        remote_storage_plugins=["kvobj"],
        use_layerwise=layerwise,
        save_unfull_chunk=True,
        blocking_timeout_secs=timeout_seconds,
        extra_config=extra,
    )
    is_mla = mla_rank is not None
    metadata = LMCacheMetadata(
        model_name=MODEL,
        world_size=2,
        local_world_size=2,
        worker_id=mla_rank or 0,
        local_worker_id=mla_rank or 0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 1 if is_mla else 2, CHUNK_TOKENS, HEADS, HEAD_SIZE),
        use_mla=is_mla,
        chunk_size=CHUNK_TOKENS,
    )
    memory = None if scheduler else LocalCPUBackend(config=config, metadata=metadata, dst_device="cpu")
    backends[name] = RemoteBackend(config, metadata, loop, memory, dst_device="cpu", plugin_name="kvobj")
    return backends[name].connection is not None


def open_configured(name: str, file: str) -> list[str]:
    """All backends that LMCache makes of a configuration's file, by their names; the last is this engine's."""
    metadata = LMCacheMetadata(
        model_name=MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, CHUNK_TOKENS, HEADS, HEAD_SIZE),
        role="worker",
        chunk_size=CHUNK_TOKENS,
    )
    made = CreateStorageBackends(LMCacheEngineConfig.from_file(file), metadata, loop, dst_device="cpu")
    backends[name] = list(made.values())[-1]
    return list(made)


def engine_keys(name: str, chunks: list[Chunk]) -> list[CacheEngineKey]:
    """LMCache's keys of an engine's rank; those of single layers where the chunks name one."""
    metadata = backends[name].metadata
    keys: list[CacheEngineKey] = []
    for chunk in chunks:
        fields = {
            "model_name": MODEL,
            "world_size": metadata.world_size,
            "worker_id": metadata.worker_id,
            "chunk_hash": chunk[0],
            "dtype": torch.bfloat16,
            "request_configs": {"lmcache.tag.user": "u1"} if chunk[0] % 2 else None,
        }
        keys.append(LayerCacheEngineKey(**fields, layer_id=chunk[3]) if len(chunk) > 3 else CacheEngineKey(**fields))
    return keys


def shape_of(name: str, chunk: Chunk) -> tuple[torch.Size, MemoryFormat]:
    """The shape and the format of a chunk as LMCache allocates it."""
    hidden, tokens = HEADS * HEAD_SIZE, chunk[1]
    if len(chunk) > 3:
        return torch.Size([tokens, 2, hidden]), MemoryFormat.KV_T2D
    if backends[name].metadata.use_mla:
        return torch.Size([1, LAYERS, tokens, hidden]), MemoryFormat.KV_MLA_FMT
    return torch.Size([2, LAYERS, tokens, hidden]), MemoryFormat.KV_2LTD


def engine_put(name: str, chunks: list[Chunk], *, dtypes: list[str] | None = None) -> None:
    """Put chunks in one batch, of these dtypes where they are not all the engine's, and wait until LMCache has given their memory
    back."""
    backend = backends[name]
    objects = []
    for chunk, dtype in zip(chunks, dtypes or ["bfloat16"] * len(chunks), strict=True):
        shape, fmt = shape_of(name, chunk)
        memory = backend.local_cpu_backend.allocate(shape, getattr(torch, dtype), fmt)
        memory.byte_array.cast("B")[:] = body_of(memory.get_size(), chunk[2])
        objects.append(memory)
    done = threading.Semaphore(0)
    backend.batched_submit_put_task(
        engine_keys(name, chunks), objects, on_complete_callback=lambda _key: done.release()
    )
    for memory in objects:
        assert done.acquire(timeout=WAIT_SECONDS)
        memory.ref_count_down()


def engine_begin_puts(name: str, chunks: list[Chunk]) -> None:
    """Put chunks, each by itself, and wait for none, as an engine does."""
    backend = backends[name]
    for chunk in chunks:
        shape, fmt = shape_of(name, chunk)
        memory = backend.local_cpu_backend.allocate(shape, torch.bfloat16, fmt)
        memory.byte_array.cast("B")[:] = body_of(memory.get_size(), chunk[2])
        keys = engine_keys(name, [chunk])
        underway.update(keys)
        backend.batched_submit_put_task(keys, [memory], on_complete_callback=underway.discard)
        memory.ref_count_down()


def engine_puts_underway() -> int:
    """How many chunks of `engine_begin_puts` are being put or wait for it."""
    return len(underway)


def engine_is_well(name: str) -> bool:
    """See `health_check`."""
    return is_well(backends[name])


class Cut:
    """Serializes a chunk to some of its first bytes, which stay what they are."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes

    def serialize(self, memory: Any) -> BytesBufferMemoryObj:  # noqa: ANN401 - LMCache's class
        return BytesBufferMemoryObj(bytes(memory.byte_array)[: self._size_bytes])

    def deserialize(self, memory: Any) -> Any:  # noqa: ANN401 - LMCache's class
        return memory


def engine_serialize(name: str, size_bytes: int) -> None:
    """Have what is put from now on be serialized to so many bytes."""
    backends[name].serializer = backends[name].deserializer = Cut(size_bytes)


def told(memory: Any) -> list[Any] | None:  # noqa: ANN401 - LMCache's class
    """What came of a chunk: shape, format, digest; its memory is given back."""
    if memory is None:
        return None
    answer = [list(memory.get_shape()), memory.get_memory_format().name, digest_of(bytes(memory.byte_array))]
    memory.ref_count_down()
    return answer


def expected(name: str, chunks: list[Chunk]) -> list[list[Any]]:
    """What `told` says of chunks that came as they were put."""
    answers = []
    for chunk in chunks:
        shape, fmt = shape_of(name, chunk)
        answers.append([list(shape), fmt.name, digest_of(body_of(shape.numel() * 2, chunk[2]))])
    return answers


def engine_get(name: str, chunks: list[Chunk], *, way: str = "batched") -> list[list[Any] | None]:
    """Get chunks by one of LMCache's three ways."""
    backend, keys = backends[name], engine_keys(name, chunks)
    if way == "single":
        return [told(backend.get_blocking(key)) for key in keys]
    if way == "batched":
        return [told(memory) for memory in backend.batched_get_blocking(keys)]
    run = asyncio.run_coroutine_threadsafe(backend.batched_get_non_blocking("look-up", keys), loop).result(WAIT_SECONDS)
    return [told(memory) for memory in run]


def engine_contains(name: str, chunks: list[Chunk]) -> list[int]:
    """Leading hits by both of LMCache's ways, and each alone."""
    backend, keys = backends[name], engine_keys(name, chunks)
    waiting = asyncio.run_coroutine_threadsafe(backend.batched_async_contains("look-up", keys, pin=True), loop)
    singles = [int(backend.contains(key)) for key in keys]
    return [backend.batched_contains(keys), waiting.result(WAIT_SECONDS), *singles]


def engine_fill(name: str) -> int:
    """Take all memory that LMCache has, and keep it: how many chunks it was."""
    taken = []
    shape = torch.Size([2, LAYERS, CHUNK_TOKENS, HEADS * HEAD_SIZE])
    allocate = backends[name].local_cpu_backend.allocate
    while (memory := allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD, busy_loop=False)) is not None:
        taken.append(memory)
    kept.extend(taken)
    return len(taken)


def engine_used_bytes(name: str) -> int:
    """Memory of LMCache's that somebody holds."""
    return int(backends[name].local_cpu_backend.memory_allocator.pin_allocator.total_allocated_size)


def connector(name: str) -> Any:  # noqa: ANN401 - LMCache's class
    """kvobj's connector, without what LMCache has put around it."""
    return backends[name].connection.getWrappedConnector()


def engine_cancel_get(name: str, chunks: list[Chunk]) -> None:
    """Begin to get chunks, and give it up at once, as LMCache does after its time-out."""
    waiting = asyncio.run_coroutine_threadsafe(connector(name).batched_get(engine_keys(name, chunks)), loop)
    waiting.cancel()


def engine_remove(name: str, chunk: Chunk) -> bool:
    """Remove a chunk."""
    return bool(backends[name].remove(engine_keys(name, [chunk])[0]))


def engine_state(name: str) -> dict[str, Any]:
    """Ping, listing and counts."""
    inner = connector(name)
    listed = asyncio.run_coroutine_threadsafe(inner.list(), loop).result(WAIT_SECONDS)
    ping = asyncio.run_coroutine_threadsafe(inner.ping(), loop).result(WAIT_SECONDS)
    return {"list": listed, "ping": ping, "report": inner.report()}


def engine_recovers(name: str, seed: int) -> bool:
    """See `health_check`."""
    return recovers(backends[name], seed)


def engine_close_under_calls(name: str, chunks: list[Chunk]) -> dict[str, Any]:
    """Close the connector over more calls than it has threads: every answer that there was of each kind, to calls that came before
    it and after it."""
    inner, keys = connector(name), engine_keys(name, chunks)
    memory = [backends[name].local_cpu_backend.allocate(shape_of(name, chunks[0])[0], torch.bfloat16) for _ in keys]
    kinds: dict[str, Any] = {
        "exists": lambda: inner.exists(keys[0]),
        "contains": lambda: inner.batched_async_contains("look-up", keys),
        "get": lambda: inner.batched_get(keys),
        "run": lambda: inner.batched_get_non_blocking("look-up", keys),
        "put": lambda: inner.batched_put(keys, memory),
    }
    later: dict[str, Any] = {**kinds, "ping": inner.ping, "list": inner.list}
    begun = {kind: [asyncio.run_coroutine_threadsafe(begin(), loop) for _ in range(5)] for kind, begin in kinds.items()}
    asyncio.run_coroutine_threadsafe(inner.close(), loop).result(WAIT_SECONDS)
    before = {kind: [each.result(WAIT_SECONDS) for each in futures] for kind, futures in begun.items()}
    after = {
        kind: [asyncio.run_coroutine_threadsafe(begin(), loop).result(WAIT_SECONDS)] for kind, begin in later.items()
    }
    for each in memory:
        each.ref_count_down()
    return {"before": {kind: distinct(answers) for kind, answers in before.items()}, "after": after}


def distinct(answers: list[Any]) -> list[Any]:
    """Every answer once."""
    return [each for index, each in enumerate(answers) if each not in answers[:index]]


def told_by_child(ask: Callable[[], int]) -> int | None:
    """What a forked child has for an answer, from 0 to 99; None where it raised, or had none in time."""
    child = os.fork()
    if child == 0:
        code = 100
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(WAIT_SECONDS))  # ends it
            code = ask()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if 0 <= code < 100 else None


def engine_contains_in_child(name: str, chunks: list[Chunk]) -> int | None:
    """How many chunks of the head of the list a forked child's connector finds, asked in a loop of the child's own."""
    keys = engine_keys(name, chunks)
    inner = connector(name)
    return told_by_child(
        lambda: asyncio.new_event_loop().run_until_complete(inner.batched_async_contains("child", keys))
    )


def look_up_in_child(name: str, keys: list[l2.Key]) -> int | None:
    """How many chunks a forked child's adapter finds."""
    return told_by_child(lambda: sum(lock(name, keys)))


def close_engine(name: str) -> None:
    """As an engine does at its end."""
    backends.pop(name).close()


if __name__ == "__main__":
    threading.Thread(target=loop.run_forever, daemon=True).start()
    serve(
        {
            "open": open_adapter,
            "open_s3": l2.open_adapter,
            "store": l2.store,
            "store_result": store_result,
            "look_up": l2.look_up,
            "lock": lock,
            "unlock": unlock,
            "load": l2.load,
            "delete": l2.delete,
            "list": l2.list_keys,
            "list_behind": list_behind,
            "call_model": call_model,
            "state": adapter_state,
            "close": close_adapter,
            "bench": l2.bench,
            "open_engine": open_engine,
            "open_configured": open_configured,
            "engine_put": engine_put,
            "engine_begin_puts": engine_begin_puts,
            "engine_puts_underway": engine_puts_underway,
            "engine_is_well": engine_is_well,
            "engine_serialize": engine_serialize,
            "engine_get": engine_get,
            "engine_contains": engine_contains,
            "engine_fill": engine_fill,
            "engine_used_bytes": engine_used_bytes,
            "engine_cancel_get": engine_cancel_get,
            "engine_remove": engine_remove,
            "engine_state": engine_state,
            "engine_recovers": engine_recovers,
            "engine_close_under_calls": engine_close_under_calls,
            "engine_contains_in_child": engine_contains_in_child,
            "look_up_in_child": look_up_in_child,
            "close_engine": close_engine,
            "expected": expected,
        }
    )
