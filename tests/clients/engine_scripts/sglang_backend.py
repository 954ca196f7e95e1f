"""SGLang's storage factory and its own host memory pools, with kvobj as the `dynamic` backend, called as its cache controller does.

Run in `.envs/engines`; see `command_lines` for how, and `engine_modules` for what of SGLang is there. What a GPU would copy is
written into and read from the host pools by their own methods.
"""

from __future__ import annotations

import hashlib
import logging
import os
from queue import Queue
from types import SimpleNamespace
from typing import Any

import engine_modules
import torch
from command_lines import body_of, digest_of, serve

engine_modules.enter_sglang()

from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import (  # noqa: E402
    KVBufferLayout,
    KVBuffers,
    MambaStateBufferInfo,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolDecl, HostPoolStorageInfo  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402

from kvobj.ids.engine_chains.sglang import page_hashes  # noqa: E402

PAGE, TOKENS, LAYERS, HEADS, WIDTH = 16, 256, 4, 2, 32
CPU = torch.device("cpu")
HOST_MEMORY: dict[str, Any] = {
    "host_to_device_ratio": 2.0,
    "host_size": 0,
    "page_size": PAGE,
    "pin_memory": False,
    "device_capacity_tokens": TOKENS,
}
backends: dict[str, Any] = {}
pools: dict[str, dict[str, Any]] = {}


def configure_logging() -> None:
    """As SGLang's `configure_logger` does, which stands among what needs the whole of it."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", force=True)


def pointers(tensors: Any) -> torch.Tensor:  # noqa: ANN401
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def mha_pool(layout: str, dtype: torch.dtype, first_layer: int = 0) -> Any:  # noqa: ANN401
    """Host memory for K and V of a small model."""
    k, v = (tuple(torch.zeros(TOKENS, HEADS, WIDTH, dtype=dtype) for _ in range(LAYERS)) for _ in range(2))
    info = MHABufferInfo(
        buffers=KVBuffers(k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=KVBufferLayout.NHD),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=dtype,
        device=CPU,
    )
    return MHATokenToKVPoolHost(
        info,
        layout=layout,
        **HOST_MEMORY,
        start_layer=first_layer,
        end_layer=first_layer + LAYERS,
    )


def mla_pool(layout: str, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Host memory for latents, the same on every rank."""
    rows = tuple(torch.zeros(TOKENS, 1, 2 * WIDTH, dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=pointers(rows),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=WIDTH,
        qk_rope_head_dim=WIDTH,
        kv_cache_dim=2 * WIDTH,
        dtype=dtype,
        device=CPU,
    )
    return MLATokenToKVPoolHost(
        info,
        layout=layout,
        **HOST_MEMORY,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def mamba_pool(dtype: torch.dtype = torch.float32, capacity: int = 64, *, has_sides: bool = False) -> Any:  # noqa: ANN401
    """Host memory for states, one a page where a prefix may end; `dtype` as `--mamba-ssm-dtype` says. `has_sides`: each has
    another one beside it, and SGLang's pool does not tell where a page lies."""
    temporal, conv = torch.zeros(LAYERS, capacity, 8, 8, dtype=dtype), torch.zeros(LAYERS, capacity, 4, 6)
    sides = (torch.zeros(capacity, 3, dtype=torch.int32),) if has_sides else ()
    info = MambaStateBufferInfo(temporal=temporal, conv=(conv,), extra_checkpoint_buffers=sides)
    return MambaPoolHost(info, 2.0, 0, device_capacity=capacity, pin_memory=False, layout="page_first")


def indexer_pool(anchor: Any) -> Any:  # noqa: ANN401
    """Host memory for the index keys of sparse attention beside latents, laid out as they are."""
    keys = [torch.zeros(TOKENS // PAGE, PAGE * 132, dtype=torch.uint8) for _ in range(LAYERS)]
    device_pool = SimpleNamespace(
        store_dtype=torch.uint8,
        start_layer=0,
        end_layer=LAYERS,
        layer_num=LAYERS,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=keys,
    )
    declared = HostPoolDecl(
        pool_name=PoolName.INDEXER,
        device_pool=device_pool,
        indices_from_pool=PoolName.KV,
        layout_source=PoolName.KV,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=132, dtype=torch.uint8),
        host_pool_builder=None,
    )
    return DSAIndexerPoolHost(declared, anchor, pin_memory=False)


def open_backend(
    name: str,
    extra: dict[str, Any],
    *,
    mla: bool = False,
    mamba: bool = False,
    layout: str = "page_first",
    dtype: str = "bfloat16",
    rank: int = 0,
    ranks: int = 1,
    stage: int = 0,
    stages: int = 1,
    part: int = 0,
    parts: int = 1,
    first_layer: int = 0,
    partition: str = "",
    kv_cache_dtype: str = "auto",
    model: str = "example/Model-8B",
) -> dict[str, Any]:
    """A backend as SGLang's factory makes it from `--hicache-storage-backend-extra-config`, with its host pools."""
    os.environ["SGLANG_PP_LAYER_PARTITION"] = partition
    get_context()._server_args = SimpleNamespace(kv_cache_dtype=kv_cache_dtype)
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=ranks,
        pp_rank=stage,
        pp_size=stages,
        attn_cp_rank=part,
        attn_cp_size=parts,
        is_mla_model=mla,
        enable_storage_metrics=True,
        is_page_first_layout=layout == "page_first",
        model_name=model,
        extra_config=extra,
    )
    made = getattr(torch, dtype)
    kv = mla_pool(layout, made) if mla else mha_pool(layout, made, first_layer)
    backend = StorageBackendFactory.create_backend("dynamic", config, kv)
    backend.register_mem_pool_host(kv)
    found = {"kv": kv}
    if mamba:
        found["mamba"] = mamba_pool()
        backend.register_mem_host_pool_v2(found["mamba"], PoolName.MAMBA)
    backend.on_host_pools_registered()
    backends[name], pools[name] = backend, found
    return {"namespace": backend.report()["namespace"]}


def add_pool(name: str, pool: str, kind: str, dtype: str = "bfloat16", capacity: int = 64) -> None:
    """Register one more pool: states, the KV of a draft model with heads or with latents, index keys, or none but in name."""
    made = getattr(torch, dtype)
    pools[name][pool] = {
        "mamba": lambda: mamba_pool(made, capacity),
        "mamba_sides": lambda: mamba_pool(made, capacity, has_sides=True),
        "indexer": lambda: indexer_pool(pools[name]["kv"]),
        "logical": lambda: LogicalHostPool(TOKENS, PAGE),
        "mha": lambda: mha_pool("page_first", made),
        "mla": lambda: mla_pool("page_first", made),
    }[kind]()
    backends[name].register_mem_host_pool_v2(pools[name][pool], PoolName(pool))


def key_of(page: int) -> str:
    """SGLang's key of a page: 64 hex digits."""
    return hashlib.sha256(f"page {page}".encode()).hexdigest()


def info_of(prefix: list[int] | None) -> Any:  # noqa: ANN401
    return HiCacheStorageExtraInfo(prefix_keys=None if prefix is None else [key_of(page) for page in prefix])


def rows_of(slots: list[int], page_size: int = PAGE) -> torch.Tensor:
    """Row indices of page slots of the host memory."""
    return torch.cat([torch.arange(slot * page_size, (slot + 1) * page_size) for slot in slots])


def flat(pool: Any, slot: int) -> torch.Tensor:  # noqa: ANN401
    """A page's bytes as SGLang itself reads them."""
    return pool.get_data_page(slot * pool.page_size, flat=True).contiguous().view(torch.uint8)


def fill(name: str, pages: list[int], slots: list[int], pool: str = "kv") -> list[str]:
    """Write each page's bytes (random, by its number) into a slot by SGLang's own method; their digests."""
    memory = pools[name][pool]
    digests = []
    for page, slot in zip(pages, slots, strict=True):
        size = flat(memory, slot).numel()
        body = bytes(byte & 0x3F for byte in body_of(size, page))  # no pattern of a number that is none
        data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        shaped = data if pool == "mamba" else data.view(memory.dtype)
        memory.set_from_flat_data_page(slot * memory.page_size, shaped)
        digests.append(digest_of(bytes(flat(memory, slot).numpy())))
    return digests


def digests(name: str, slots: list[int], pool: str = "kv") -> list[str]:
    """What lies in slots now."""
    return [digest_of(bytes(flat(pools[name][pool], slot).numpy())) for slot in slots]


def set_v1(name: str, pages: list[int], slots: list[int], prefix: list[int] | None = None) -> list[bool]:
    """`batch_set_v1`."""
    keys = [key_of(page) for page in pages]
    return list(backends[name].batch_set_v1(keys, rows_of(slots), info_of(prefix)))


def get_v1(name: str, pages: list[int], slots: list[int]) -> list[bool]:
    """`batch_get_v1`."""
    return list(backends[name].batch_get_v1([key_of(page) for page in pages], rows_of(slots), info_of(None)))


def exists(name: str, pages: list[int], prefix: list[int] | None = None) -> int:
    """`batch_exists`."""
    return int(backends[name].batch_exists([key_of(page) for page in pages], info_of(prefix)))


def transfers(pages: list[int], slots: list[int], mamba_pages: list[int], mamba_slots: list[int]) -> list[PoolTransfer]:
    """KV pages, and states at some of them."""
    made = []
    if pages:
        made.append(PoolTransfer(PoolName.KV, host_indices=rows_of(slots), keys=[key_of(page) for page in pages]))
    if mamba_pages:
        made.append(
            PoolTransfer(
                PoolName.MAMBA, host_indices=rows_of(mamba_slots, 1), keys=[key_of(page) for page in mamba_pages]
            )
        )
    return made


def set_v2(name: str, **which: list[int]) -> dict[str, list[bool]]:
    """`batch_set_v2`."""
    return {pool.value: done for pool, done in backends[name].batch_set_v2(transfers(**which)).items()}


def get_v2(name: str, **which: list[int]) -> dict[str, list[bool]]:
    """`batch_get_v2`."""
    return {pool.value: done for pool, done in backends[name].batch_get_v2(transfers(**which)).items()}


def set_pool(name: str, pool: str, pages: list[int], slots: list[int]) -> list[bool]:
    """`batch_set_v2` of one pool."""
    return list(backends[name].batch_set_v2([transfer_of(name, pool, pages, slots)])[PoolName(pool)])


def get_pool(name: str, pool: str, pages: list[int], slots: list[int]) -> list[bool]:
    """`batch_get_v2` of one pool."""
    return list(backends[name].batch_get_v2([transfer_of(name, pool, pages, slots)])[PoolName(pool)])


def transfer_of(name: str, pool: str, pages: list[int], slots: list[int]) -> PoolTransfer:
    """Pages of a pool and where they lie in its memory."""
    rows = rows_of(slots, pools[name][pool].page_size)
    return PoolTransfer(PoolName(pool), host_indices=rows, keys=[key_of(page) for page in pages])


def exists_v2(  # noqa: PLR0917 - a command's fields
    name: str,
    pages: list[int],
    policy: str,
    count: int = 1,
    block_pages: int = 0,
    group_pages: int = 0,
    pool: str = "mamba",
) -> dict[str, Any]:
    """`batch_exists_v2` with one more pool; `count` is how many pages its transfer names."""
    keys = [key_of(page) for page in pages]
    transfer = PoolTransfer(
        PoolName(pool),
        keys=keys[:count],
        hit_policy=PoolHitPolicy(policy),
        block_pages=block_pages,
        group_pages=group_pages,
    )
    found = backends[name].batch_exists_v2(keys, [transfer])
    return {
        "pages": found.kv_hit_pages,
        "reach": {each.value: pages for each, pages in found.extra_pool_hit_pages.items()},
        "lengths": found.restorable_prefix_pages,
    }


def set_pages(name: str, pages: list[int], slots: list[int]) -> bool:
    """The older `batch_set`, as the controller calls it."""
    memory = pools[name]["kv"]
    data = [memory.get_data_page(slot * PAGE) for slot in slots]
    return bool(backends[name].batch_set([key_of(page) for page in pages], data))


def set_stacked(name: str, pages: list[int], slots: list[int]) -> bool:
    """The older `batch_set` with all pages in one tensor."""
    memory = pools[name]["kv"]
    data = torch.stack([memory.get_data_page(slot * PAGE) for slot in slots])
    return bool(backends[name].batch_set([key_of(page) for page in pages], data))


def get_pages(name: str, pages: list[int], slots: list[int]) -> list[bool]:
    """The older `batch_get`, as the controller calls it."""
    memory = pools[name]["kv"]
    came = backends[name].batch_get(
        [key_of(page) for page in pages], [memory.get_dummy_flat_data_page() for _ in pages]
    )
    for slot, data in zip(slots, came, strict=True):
        if data is not None:
            memory.set_from_flat_data_page(slot * PAGE, data)
    return [data is not None for data in came]


def hashes_of(tokens: list[int], parent: str | None = None, page_size: int = PAGE) -> list[str]:
    """SGLang's page hashes; its own function compiles itself with a C++ compiler when it is called."""
    front = None if parent is None else bytes.fromhex(parent)
    return [digest.hex() for digest in page_hashes(tokens, page_tokens=page_size, parent=front)]


def controller_of(name: str) -> Any:  # noqa: ANN401
    """SGLang's cache controller with what its storage threads use, without the GPU side that its constructor wants."""
    made = object.__new__(cache_controller.HiCacheController)
    made.page_size = PAGE
    made.storage_backend = backends[name]
    made.storage_host_pool = made.mem_pool_host = pools[name]["kv"]
    made.page_get_func, made.page_set_func = made._page_get_zero_copy, made._page_set_zero_copy
    made.prefetch_sync_queue = Queue()
    return made


def control(name: str, tokens: int, known: int, *, passes_prefix: bool, batch: int) -> dict[str, Any]:
    """Back up a sequence as the controller does, `batch` pages at a time, then look it up and prefetch what is behind `known`
    pages into other slots: what came, and whether SGLang reads the same bytes."""
    cache_controller.STORAGE_BATCH_SIZE, cache_controller.get_storage_hash_str = batch, hashes_of
    controller, ids = controller_of(name), list(range(tokens))
    hashes = hashes_of(ids)
    pages = len(hashes)
    fill(name, list(range(pages)), list(range(pages)))
    backup = cache_controller.StorageOperation(
        rows_of(list(range(pages))), ids, hash_value=hashes, prefix_keys=[] if passes_prefix else None
    )
    controller._page_backup(backup)
    wanted = cache_controller.PrefetchOperation(
        "request",
        ids[known * PAGE :],
        hashes[known - 1] if known else None,
        prefix_keys=hashes[:known] if passes_prefix else None,
    )
    found, count = controller._storage_hit_query(wanted)
    wanted.hash_value, wanted.host_indices = found, rows_of([pages + slot for slot in range(len(found))])
    fetched = controller._page_transfer(wanted)
    written = digests(name, list(range(known, pages)))
    return {
        "backed_up": backup.completed_tokens,
        "found": count,
        "fetched": fetched,
        "same": written == digests(name, [pages + slot for slot in range(len(found))]),
    }


def misfit(name: str, pages: list[int], slots: list[int]) -> dict[str, Any]:
    """Indices that do not fit the keys."""
    keys = [key_of(page) for page in pages]
    backend = backends[name]
    return {
        "get": backend.batch_get_v1(keys, rows_of(slots)),
        "set": backend.batch_set_v1(keys, rows_of(slots)),
        "none": backend.batch_get_v2([PoolTransfer(PoolName.KV, keys=keys)])[PoolName.KV],
        "unknown": backend.batch_get_v2([PoolTransfer(PoolName.SWA, keys=keys, host_indices=rows_of(slots))])[
            PoolName.SWA
        ],
    }


def stats(name: str) -> dict[str, Any]:
    """What SGLang's metrics would be given."""
    told = backends[name].get_stats()
    return {"prefetch_pgs": told.prefetch_pgs, "backup_pgs": told.backup_pgs, "speeds": len(told.prefetch_bandwidth)}


def report(name: str) -> dict[str, Any]:
    """The link's own account."""
    told: dict[str, Any] = backends[name].report()
    return told


def clear(name: str) -> None:
    """`clear`."""
    backends[name].clear()


def close(name: str) -> None:
    """`close`, as a detach does."""
    backends.pop(name).close()


COMMANDS = (
    *(
        fill,
        digests,
        set_v1,
        get_v1,
        exists,
        set_v2,
        get_v2,
        exists_v2,
        set_pages,
        set_stacked,
        get_pages,
        control,
        misfit,
    ),
    *(add_pool, set_pool, get_pool),
    *(stats, report, clear, close, configure_logging),
)

if __name__ == "__main__":
    serve({"open": open_backend, **{command.__name__: command for command in COMMANDS}})
    for opened in list(backends):
        close(opened)
    os._exit(0)
