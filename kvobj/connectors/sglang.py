"""SGLang's HiCache storage, loaded as its `dynamic` backend: pages of its host memory go to a store, and come back from it.

Written against the interface of SGLang 0.5.23, `sglang/srt/mem_cache/hicache_storage.py`; docs/engines/sglang.md has the
configuration. SGLang calls it from threads of its own, one for what comes and one for what goes, and waits for the answer.

With `interface_v1` bytes go straight from and into SGLang's host memory. A page lies there in one buffer or a few (K and V); each
is a chunk, named by SGLang's hash of the page and all before it. A page in more than `PARTS_MAX` buffers (the layer-first layouts)
is one chunk, put together in memory of ours: one copy more; and so is one whose pool does not tell where it lies. Pages of the
older interface are one chunk under a name of their own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvobj.client.kv_values import ROOT, NewChunk
from kvobj.connectors.clearing import clear
from kvobj.connectors.engine_namespace import EngineFacts, fact_digest, link_settings, partition_fact
from kvobj.connectors.link import StoreLink
from kvobj.connectors.sglang_memory import Page, PagePool, all_of, batches, first_layer, page_pool, tensor_bytes
from kvobj.connectors.sglang_pages import (
    Verdict,
    group_verdict,
    leading_verdict,
    part_names,
    trailing_verdict,
)

_LOG: Final = logging.getLogger("kvobj.connectors.sglang")
_OWN_SETTINGS: Final = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "chains"})
"""Those of SGLang's factory and controller, and `chains`."""
_COPIED: Final = (
    "; without interface_v1 each page is copied once more, and has another name and namespace than with it: set it to 1"
)
_KV: Final = "kv"
_RANKED_POOLS: Final[Mapping[str, tuple[type, ...]]] = {
    "mamba": (),
    "draft": (MLATokenToKVPoolHost,),
    "draft_swa": (MLATokenToKVPoolHost, DeepSeekV4PagedHostPool),
}
"""State that each rank has a share of, also where the KV itself is the same on all of them (MLA), but for pools of these classes,
which are the same on all ranks as well, and which SGLang has one rank write (`MooncakeStore._get_hybrid_page_component_keys`)."""
_TRAILING_PAGES_MAX: Final = 1024
"""How far back from the end of a prefix states that exist at some pages only are looked for."""
_CLEAR_SECONDS: Final = 120.0
"""SGLang's scheduler waits for a clear, and serves nobody meanwhile."""


class KvobjHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed where types are checked
    """`{"backend_name": "kvobj", "module_path": "kvobj.connectors.sglang", "class_name": "KvobjHiCache", "interface_v1": 1,
    "endpoint": …, "bucket": …}`.

    `chains`: pages hang under the page before them, for which SGLang has to pass prefixes (`hicache_storage_pass_prefix_keys`);
    the store then gives up the end of a sequence before its beginning. All else is `link_settings`'. `ConfigurationError` for a
    table that cannot be used; a store that cannot be reached is none: every page is a miss until it can.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, object] | None = None) -> None:  # noqa: ANN401, ARG002
        self.storage_config = storage_config
        extra = dict(storage_config.extra_config or {})
        self._table = {name: value for name, value in extra.items() if name not in _OWN_SETTINGS}
        self._is_zero_copy = bool(extra.get("interface_v1", 0))
        self._has_chains = extra.get("chains", False)
        self._timings: list[tuple[bool, int, int, float]] = []
        self._is_fault_told = False
        self._kv: PagePool | None = None
        self._is_logical = False
        self.registered_pools: dict[str, Any] = {}
        self._pools: dict[str, PagePool | None] = {}
        """None: one whose pages cannot be read, which was told when it was registered."""
        self._pool_digests: dict[str, str] = {}
        self._link = StoreLink(
            self._settings({}, chunk_tokens=1), log=_LOG
        )  # until the memory is known: tells wrong settings

    # -- the memory ----------------------------------------------------------------------------------------------
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401 - SGLang's HostKVCache
        """The KV memory; what it holds decides the namespace."""
        super().register_mem_pool_host(mem_pool_host)
        page_size = _page_size(mem_pool_host)
        self._is_logical = getattr(mem_pool_host, "kv_buffer", None) is None
        self._kv = page_pool(mem_pool_host) if self._is_zero_copy and not self._is_logical else None
        sizes = self._kv.sizes if self._kv is not None else []
        facts = {
            "dtype": str(getattr(mem_pool_host, "dtype", "")),
            "memory": str(getattr(mem_pool_host, "layout", "")),
            "layers": int(getattr(mem_pool_host, "layer_num", 0) or 0),
            **first_layer(mem_pool_host),
            # Some pools (DeepSeek-V4's) count their layers from 0 in each stage.
            **partition_fact(os.environ.get("SGLANG_PP_LAYER_PARTITION", ""), self.storage_config.pp_size),
            **_meant_dtype(getattr(mem_pool_host, "dtype", None)),
            **({"form": "flat"} if self._kv is not None and self._kv.flat_dtype is not None else {}),
            "buffers": len(sizes),
            "bytes": sum(sizes) or int(getattr(mem_pool_host, "size_per_token", 0) or 0) * page_size,
        }
        self._link.close()
        self._link = StoreLink(self._settings(facts, chunk_tokens=page_size), log=_LOG)
        self._link.connect()
        _LOG.info(
            "pages go to namespace %s at %s%s",
            self._link.settings.namespace,
            self._link.settings.endpoint,
            "" if self._is_zero_copy else _COPIED,
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:  # noqa: ANN401 - SGLang's HostKVCache
        """A pool beside it (states, indexers, sliding windows, drafts). What its pages hold is in the names of its chunks: the
        namespace is declared before pools are known, and says nothing of them. Of one whose pages cannot be read nothing is stored
        or found, which is told here once."""
        name = _text(host_pool_name)
        self.registered_pools[name] = host_pool
        if name == _KV:  # the memory itself, which was registered as that
            return
        try:
            pool = self._pools[name] = page_pool(host_pool)
        except Exception as error:  # noqa: BLE001 - each pool raises what it likes
            self._pools[name] = None
            _LOG.error(
                "pool %s: its pages can be neither stored nor found, and no prefix that needs them: %s", name, error
            )
        else:
            self._pool_digests[name] = fact_digest(pool.facts())

    def on_host_pools_registered(self) -> None:
        """Nothing waits for it: pools may come later, too."""

    # -- looking up ----------------------------------------------------------------------------------------------
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ANN401 - SGLang's
        """How many pages are stored in one piece from the first."""
        if self._is_logical:
            return len(keys)
        before = self._prefix(extra_info)  # a chain is found from its beginning
        names = [name for key in (*before, *keys) for name in self._names(key, _KV, self._kv_parts)]
        return max(0, self._link.run(names) // self._kv_parts - len(before)) if keys else 0

    def exists(self, key: str) -> bool:
        """Whether the page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[Any] | None = None,
        extra_info: Any = None,  # noqa: ANN401 - SGLang's
    ) -> PoolTransferResult:
        """The longest prefix that can be restored, every length that can, and how far each pool reaches."""
        kv_pages = self.batch_exists(keys, extra_info)
        reach: dict[Any, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = set(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            verdict = self._verdict(keys, kv_pages, transfer)
            if verdict.pages:
                reach[transfer.name] = verdict.pages
            if verdict.lengths is not None:
                restorable &= verdict.lengths
        return PoolTransferResult(max(restorable, default=0), reach, sorted(restorable))

    # -- pages, straight from and into the memory ----------------------------------------------------------------
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ANN401, ARG002
        """Fill pages of the KV memory: which came whole."""
        if self._is_logical:
            return [True] * len(keys)
        return self._get(self._pages(_KV, keys, host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ANN401 - SGLang's
        """Store pages of the KV memory: which are stored now. With `chains` only those whose prefix is."""
        if self._is_logical or not self.storage_config.is_storage_writer:
            return [True] * len(keys)
        pages = self._pages(_KV, keys, host_indices)
        return self._set(pages, parent=self._parent(extra_info))

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ANN401, ARG002
        """Fill pages of several pools."""
        return self._each_pool(transfers, self._get)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ANN401, ARG002
        """Store pages of several pools. They hang under nothing: SGLang stores them before their KV."""
        return self._each_pool(transfers, lambda pages: self._set(pages, parent=None))

    # -- the older interface: pages as tensors -------------------------------------------------------------------
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:  # noqa: ANN401, ARG002
        """A page in the tensor that was given, which has its size; None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[Any] | None = None,
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's
    ) -> list[torch.Tensor | None]:
        """Pages in the tensors that were given; a page without one is a miss, since its size is not known."""
        targets = [] if target_locations is None else list(target_locations)
        fits = len(targets) == len(keys) and all(_is_target(target) for target in targets)
        if not fits:
            return [None] * len(keys)
        pages = [
            Page(self._names(key, _KV, 1), [tensor_bytes(target)]) for key, target in zip(keys, targets, strict=True)
        ]
        came = self._get(pages)
        return [target if is_there else None for target, is_there in zip(targets, came, strict=True)]

    def set(
        self,
        key: str,
        value: Any = None,  # noqa: ANN401 - SGLang's
        target_location: Any = None,  # noqa: ANN401 - SGLang's
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's
    ) -> bool:
        """Store a page."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Any] | None = None,
        target_locations: Sequence[Any] | None = None,
        target_sizes: Any = None,  # noqa: ANN401, ARG002 - SGLang's
    ) -> bool:
        """Store pages: whether all are stored now."""
        given = target_locations if values is None else values
        tensors = [] if given is None else list(given)  # also one tensor, of which each row is a page
        if len(tensors) != len(keys) or not all(isinstance(each, torch.Tensor) for each in tensors):
            return False
        flat = [each.detach().contiguous().cpu() for each in tensors]  # kept here while their bytes are read
        pages = [Page(self._names(key, _KV, 1), [tensor_bytes(each)]) for key, each in zip(keys, flat, strict=True)]
        return all(self._set(pages, parent=None))

    # -- the rest ------------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Remove this rank's pages from the store. Raises where pages are not removed, and may be had on, as `clearing.clear` does:
        `AccessDeniedError` for who may not (the bucket's owner and root may), else `UnavailableError`. Ends within
        `_CLEAR_SECONDS` and two calls' time, also while others store on."""
        clear(self._link, seconds=_CLEAR_SECONDS)

    def get_stats(self) -> Any:  # noqa: ANN401 - SGLang's StorageMetrics
        """Pages and GiB/s of each batch since the last call, as SGLang exports them with `--enable-metrics`."""
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415 - of metrics alone

        timings, self._timings = self._timings, []
        stats = StorageMetrics()
        for is_load, pages, size_bytes, seconds in timings:
            (stats.prefetch_pgs if is_load else stats.backup_pgs).append(pages)
            speeds = stats.prefetch_bandwidth if is_load else stats.backup_bandwidth
            speeds.append(size_bytes / 2**30 / max(seconds, 1e-9))
        return stats

    def report(self) -> dict[str, object]:
        """The link's account of itself, for who debugs."""
        return self._link.report()

    def close(self) -> None:
        """End what is held and the connections. Idempotent."""
        self._link.close()

    # -- inside --------------------------------------------------------------------------------------------------
    def _settings(self, facts: Mapping[str, object], *, chunk_tokens: int) -> Any:  # noqa: ANN401
        config = self.storage_config
        return link_settings(
            self._table,
            os.environ,
            EngineFacts(
                engine="sglang",
                model=config.model_name or "",
                chunk_tokens=chunk_tokens,
                tensor=(0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size),
                pipeline=(config.pp_rank, config.pp_size),
                context=(config.attn_cp_rank, config.attn_cp_size),
                decode_context=(config.dcp_rank, config.dcp_size),
                others={
                    **facts,
                    "chains": int(bool(self._has_chains)),
                    "context": f"{config.attn_cp_rank}of{config.attn_cp_size}",
                    "decode_context": f"{config.dcp_rank}of{config.dcp_size}",
                },
            ),
            problems=[] if isinstance(self._has_chains, bool) else ["chains: is neither true nor false"],
        )

    def _names(self, key: str, pool: str, parts: int) -> list[str]:
        if pool == _KV:
            return part_names(key, "", "", "" if self._is_zero_copy else "page", parts)
        replicated = _RANKED_POOLS.get(pool)
        is_ranked = self.storage_config.is_mla_model and replicated is not None
        if is_ranked and not isinstance(self.registered_pools.get(pool), replicated or ()):
            rank = f"tp{self.storage_config.tp_rank}of{self.storage_config.tp_size}"
        else:
            rank = ""
        return part_names(key, f"{pool}-{self._pool_digests.get(pool, '')}", rank, "", parts)

    def _prefix(self, extra_info: Any) -> list[str]:  # noqa: ANN401 - SGLang's HiCacheStorageExtraInfo
        """SGLang's keys of the pages before, where pages hang under them."""
        return list(getattr(extra_info, "prefix_keys", None) or ()) if self._has_chains else []

    def _parent(self, extra_info: Any) -> str | None:  # noqa: ANN401 - SGLang's HiCacheStorageExtraInfo
        """The chunk that the next one hangs under; None: under nothing."""
        if not self._has_chains:
            return None
        before = self._prefix(extra_info)
        return self._names(before[-1], _KV, self._kv_parts)[-1] if before else ROOT

    def _verdict(self, keys: list[str], kv_pages: int, transfer: Any) -> Verdict:  # noqa: ANN401 - SGLang's PoolTransfer
        name = _text(transfer.name)
        pool = self._pool(name)
        if pool is None:
            return Verdict(0, set())
        parts = pool.parts

        def names_of(wanted: Sequence[str]) -> list[str]:
            return [each for key in wanted for each in self._names(key, name, parts)]

        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return leading_verdict(self._link.run(names_of(keys[:kv_pages])) // parts)
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            start = max(0, kv_pages - _TRAILING_PAGES_MAX)
            found = self._link.present(names_of(keys[start:kv_pages]))
            pages = [all(found[at : at + parts]) for at in range(0, len(found), parts)]
            return trailing_verdict(pages, start=start, window=max(1, len(transfer.keys or ())))
        if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
            wanted = list(transfer.keys or ())
            run = self._link.run(names_of(wanted)) // parts
            return group_verdict(
                run, block_pages=transfer.block_pages, group_pages=transfer.group_pages, pages=len(keys)
            )
        _LOG.error("the hit policy %s is not known", transfer.hit_policy)
        return Verdict(0, set())

    @property
    def _kv_parts(self) -> int:
        return self._kv.parts if self._kv is not None else 1

    def _pool(self, name: str) -> PagePool | None:
        """None for one that cannot be read."""
        if name == _KV:
            return self._kv
        if name not in self._pools:
            _LOG.error("pool %s is not registered", name)
        return self._pools.get(name)

    def _pages(self, name: str, keys: Sequence[str], indices: Any) -> list[Page]:  # noqa: ANN401
        """The pages' names and buffers; none where indices do not fit the keys."""
        count = 0 if indices is None else len(indices)
        if not keys and not count:
            return []
        nothing = [Page([], [])] * len(keys)
        pool = self._pool(name)
        if pool is None:
            return nothing
        if indices is None or count != len(keys) * pool.page_size:
            _LOG.error("pool %s: %d keys of %d rows, and %d rows", name, len(keys), pool.page_size, count)
            return nothing
        try:
            return pool.pages([self._names(key, name, pool.parts) for key in keys], indices)
        except Exception:  # noqa: BLE001 - the pool's own, for rows that are none of its
            self._note_fault(f"pool {name}")
            return nothing

    def _each_pool(self, transfers: Sequence[Any], move: Any) -> dict[str, list[bool]]:  # noqa: ANN401
        """All pools' pages in one go."""
        pages: list[Page] = []
        spans: list[tuple[Any, int, int]] = []
        for transfer in transfers:
            begin = len(pages)
            pages += self._pages(_text(transfer.name), list(transfer.keys or ()), transfer.host_indices)
            spans.append((transfer.name, begin, len(pages)))
        moved = move(pages) if pages else []
        return {name: moved[begin:end] for name, begin, end in spans}

    def _get(self, pages: Sequence[Page]) -> list[bool]:
        began, got = time.monotonic(), []
        for some in batches(pages):
            staged = [bytearray(page.size_bytes) if page.is_staged else None for page in some]
            names = [name for page in some for name in page.names]
            rooms = [
                room
                for page, stage in zip(some, staged, strict=True)
                for room in (page.rooms if stage is None else [memoryview(stage)])
            ]
            came = iter(self._link.load(names, rooms))
            for page, stage in zip(some, staged, strict=True):
                is_whole = bool(page.names) and all_of(came, len(page.names))
                got.append(is_whole and (stage is None or self._unpacked(page, stage)))
        self._timed(pages, got, began, is_load=True)
        return got

    def _set(self, pages: Sequence[Page], *, parent: str | None) -> list[bool]:
        began, put = time.monotonic(), []
        for some in batches(pages):
            buffers = [self._packed(page) if page.is_staged else page.rooms for page in some]
            chunks: list[NewChunk] = []
            for page, data in zip(some, buffers, strict=True):
                for name, room in zip(page.names, data, strict=False):  # of a page that cannot be read there are none
                    chunks.append(NewChunk(name, room, parent=parent))
                    parent = None if parent is None else name
                if parent is not None and page.names:
                    parent = page.names[-1]  # also where it is not stored: what follows hangs under nothing else
            stored = iter(self._link.store(chunks))
            put += [bool(data) and all_of(stored, len(data)) for data in buffers]
        self._timed(pages, put, began, is_load=False)
        return put

    def _packed(self, page: Page) -> list[memoryview]:
        try:
            return [page.packed()]
        except Exception:  # noqa: BLE001 - the pool's own, for rows that are none of its
            self._note_fault(page.names[0])
            return []

    def _unpacked(self, page: Page, stage: bytearray) -> bool:
        try:
            page.unpack(stage)
        except Exception:  # noqa: BLE001 - the pool's own, for bytes that are no page of it
            self._note_fault(page.names[0])
            return False
        return True

    def _note_fault(self, what: str) -> None:
        """In the log once, since what a pool refuses it goes on refusing."""
        if not self._is_fault_told:
            self._is_fault_told = True
            _LOG.exception("%s: pages of SGLang's memory cannot be read or written, and are misses", what)

    def _timed(self, pages: Sequence[Page], moved: Sequence[bool], began: float, *, is_load: bool) -> None:
        if self.storage_config.enable_storage_metrics and any(moved):
            size_bytes = sum(page.size_bytes for page, is_there in zip(pages, moved, strict=True) if is_there)
            self._timings.append((is_load, sum(moved), size_bytes, time.monotonic() - began))
            del self._timings[:-1000]


def _is_target(tensor: object) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_contiguous()
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
    )


def _meant_dtype(stored: object) -> dict[str, object]:
    """What bytes stand for: both kinds of fp8, and fp4, are stored as uint8 (`KVCache.store_dtype`), and AMD's fp8 is its own."""
    if stored is not torch.uint8:
        return {}
    try:
        from sglang.srt.runtime_context import get_server_args  # noqa: PLC0415 - where it is needed, which is seldom

        meant = str(get_server_args().kv_cache_dtype)
    except (ImportError, AttributeError, ValueError):  # without arguments, as in a test
        meant = ""
    return {"stands_for": f"{meant}-hip" if torch.version.hip else meant}


def _page_size(host_pool: Any) -> int:  # noqa: ANN401 - SGLang's
    return int(getattr(host_pool, "page_size", 1) or 1)


def _text(name: Any) -> str:  # noqa: ANN401 - SGLang's PoolName, or a string
    return str(getattr(name, "value", name))
