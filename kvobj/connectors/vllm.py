"""vLLM's secondary tier: KV blocks that leave its CPU memory go to a store, and come back from it.

Loaded by vLLM itself from its configuration (docs/engines/vllm.md); written against the interface of vLLM 0.33.0,
`vllm/v1/kv_offload/tiering/base.py`. All methods run in vLLM's scheduler under its lock and never wait: look-ups and copies are
made by threads, except in `drain_jobs` and `shutdown`, whose contract is to wait.

A chunk is one row of vLLM's CPU memory: the block's bytes of all layers and of all workers of the instance, with their padding.
Its name is vLLM's own hash of the block and all before it, with the KV cache group's number.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvobj.client.kv_values import NewChunk
from kvobj.connectors.ending_threads import CLOSE_SECONDS
from kvobj.connectors.engine_namespace import EngineFacts, fact_digest, link_settings, partition_fact
from kvobj.connectors.link import StoreLink
from kvobj.connectors.lookups import Lookups
from kvobj.connectors.transfers import Finished, Piece, Transfers, store_threads_of

_LOG: Final = logging.getLogger("vllm.kvobj")
"""Below vLLM's own logger, the one that vLLM configures: its log shows no other's lines of INFO."""
_THREADS: Final = 4
_THREADS_MAX: Final = 64
_THREADS_MIN: Final = 2
"""One that may store, and one that stores keep nobody from."""
_PIECE_CHUNKS_MIN: Final = 8
_SUSPECTS_MAX: Final = 65_536

_HITS: Final = "vllm:kv_offload_kvobj_lookup_hits"
_MISSES: Final = "vllm:kv_offload_kvobj_lookup_misses"
_LOAD_FAILURES: Final = "vllm:kv_offload_kvobj_load_failures"
_STORE_FAILURES: Final = "vllm:kv_offload_kvobj_store_failures"
_IS_UP: Final = "vllm:kv_offload_kvobj_up"
_COUNTERS: Final = {
    _HITS: "Chunks that were looked up in the store and found.",
    _MISSES: "Chunks that were looked up in the store and not found, or not answered for in time.",
    _LOAD_FAILURES: "Chunks that could not be loaded from the store though they had been found.",
    _STORE_FAILURES: "Chunks that the store did not take.",
}


class KvobjTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """`{"type": "KvobjTier", "module_path": "kvobj.connectors.vllm", "endpoint": …, "bucket": …}`.

    `enable_kv_events` and `locality` mean what they mean for vLLM's own tiers, `io_threads` how many copy (two at least, of which
    one only loads); all else is `link_settings`'. `ConfigurationError` and `ValueError` for a configuration that cannot be used; a
    store that cannot be reached is none: everything is a miss until it can.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,  # noqa: ANN401 - vLLM's OffloadingSpec
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: object = None,
        *,
        enable_kv_events: bool = False,
        locality: str | None = None,
        io_threads: int = _THREADS,
        **store: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        shape = primary_kv_view.shape or ()
        if len(shape) != 2 or primary_kv_view.readonly:  # noqa: PLR2004
            raise ValueError(f"the primary tier's memory is no writable table of rows, but {shape}")
        given: object = io_threads  # from the user's JSON
        is_whole = isinstance(given, int) and not isinstance(given, bool) and 1 <= given <= _THREADS_MAX
        problems = [] if is_whole else [f"io_threads: is no whole number from 1 to {_THREADS_MAX}"]
        self.locality = Locality(locality) if locality is not None else None
        self._rows: np.ndarray[Any, Any] | None = np.asarray(primary_kv_view)
        self._row_count = shape[0]
        self._row_bytes = shape[1] * primary_kv_view.itemsize
        settings = link_settings(store, os.environ, _facts_of(offloading_spec, self._row_bytes), problems=problems)
        threads = max(_THREADS_MIN, io_threads)
        self._link = StoreLink(settings, log=_LOG, store_threads=store_threads_of(threads))
        self._link.connect()
        self._lookups = Lookups(self._link, name_of=chunk_name, deadline_seconds=settings.timeout_seconds)
        self._transfers = Transfers(threads=threads, store_wait_seconds=2 * settings.timeout_seconds)
        self._keys: dict[int, list[bytes]] = {}
        self._suspects: set[str] = set()
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        self._counts = dict.fromkeys((_LOAD_FAILURES, _STORE_FAILURES), 0)
        self._told: dict[str, int] = {}
        _LOG.info(
            "chunks of %d bytes go to namespace %s of %s at %s",
            self._row_bytes,
            settings.namespace,
            settings.bucket,
            settings.endpoint,
        )

    # -- looking up ----------------------------------------------------------------------------------------------
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:  # noqa: ANN401 - vLLM's ReqContext
        """HIT: stored, and held for this request. RETRY: the answer is on its way, and comes within the store's time-out."""
        found = self._lookups.ask(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def touch(self, keys: Iterable[bytes], req_context: object) -> None:  # noqa: ARG002 - vLLM's signature
        """Blocks that are used from the GPU or the CPU stay known to the store's policy. vLLM's manager passes it on; the scheduler
        of 0.33.0 never calls it."""
        self._lookups.touch(keys)

    def on_new_request(self, req_context: object) -> RequestOffloadingContext:  # noqa: ARG002 - vLLM's signature
        """Only what is computed is stored."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:  # noqa: ANN401 - vLLM's ReqContext
        """What only this request asked for is held no longer."""
        self._lookups.ended(req_context.req_id)

    def on_schedule_end(self, context: object) -> None:  # noqa: ARG002 - vLLM's signature
        """The step's look-ups go out in one batch."""
        self._lookups.flush()

    # -- copying -------------------------------------------------------------------------------------------------
    def submit_store(self, job_metadata: Any) -> None:  # noqa: ANN401 - vLLM's TransferJob
        """Copy rows to the store; what it has already is not sent again."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:  # noqa: ANN401 - vLLM's TransferJob
        """Fill rows from the store."""
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> list[JobResult]:
        """Jobs that ended, with the blocks that did arrive where some did not."""
        return [self._result(ended) for ended in self._transfers.finished()]

    def drain_jobs(self) -> None:
        """Wait until nothing reads or writes vLLM's memory: at most a few time-outs of the store."""
        self._transfers.drain()

    def shutdown(self) -> None:
        """End the threads, then what is held: calls that the store has not answered by then are ended. Idempotent, bounded."""
        deadline = time.monotonic() + CLOSE_SECONDS
        self._lookups.close(deadline)
        self._transfers.close(deadline)
        self._link.close()
        self._rows = None  # vLLM unmaps the memory next

    # -- reporting -----------------------------------------------------------------------------------------------
    def take_events(self) -> list[OffloadingEvent]:
        """Blocks that the store has taken since the last call."""
        if not self._events:
            return []
        taken, self._events = self._events, []
        return taken

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, object]) -> dict[str, Any]:  # noqa: ARG003
        """Of `get_stats`, for Prometheus; vLLM counts bytes, jobs and latencies of each tier itself."""
        definitions: dict[str, Any] = {
            name: OffloadingCounterMetadata(documentation=documentation) for name, documentation in _COUNTERS.items()
        }
        definitions[_IS_UP] = OffloadingGaugeMetadata(documentation="1 while the store can be reached.")
        return definitions

    def get_stats(self) -> OffloadingConnectorStats:
        """What was counted since the last call."""
        stats = OffloadingConnectorStats()
        counts = {_HITS: self._lookups.hits, _MISSES: self._lookups.misses, **self._counts}
        for name, count in counts.items():
            if count > self._told.get(name, 0):
                stats.increase_counter(name, count - self._told.get(name, 0))
        self._told = counts
        stats.set_gauge(_IS_UP, int(bool(self._link.report()["is_up"])))
        return stats

    @classmethod
    def config_info_keys(cls, tier_config: Mapping[str, object]) -> tuple[str, ...]:  # noqa: ARG003
        """Labels of vLLM's info metric."""
        return ("kvobj_endpoint", "kvobj_bucket", "kvobj_namespace")

    def config_info(self) -> dict[str, str]:
        """Their values."""
        settings = self._link.settings
        return {
            "kvobj_endpoint": settings.endpoint,
            "kvobj_bucket": settings.bucket,
            "kvobj_namespace": settings.namespace,
        }

    def report(self) -> dict[str, object]:
        """The link's account of itself, for who debugs."""
        return self._link.report()

    # -- inside --------------------------------------------------------------------------------------------------
    def _submit(self, job: Any, *, is_load: bool) -> None:  # noqa: ANN401 - vLLM's TransferJob
        keys = list(job.keys)
        self._keys[job.job_id] = keys
        rows = self._views(job.chunk_ids, len(keys))
        pieces: list[Piece] = []
        if rows is not None:
            threads = self._transfers.threads if is_load else self._transfers.store_threads
            each = max(_PIECE_CHUNKS_MIN, -(-len(keys) // threads))
            names = [chunk_name(key) for key in keys]
            for start in range(0, len(keys), each):
                some, views = names[start : start + each], rows[start : start + each]
                copying = self._loading(some, views) if is_load else self._storing(some, views)
                pieces.append(Piece(len(some), copying))
        self._transfers.submit(job.job_id, pieces, is_load=is_load)

    def _views(self, chunk_ids: Iterable[int], count: int) -> list[memoryview] | None:
        """The job's rows; None for a job that does not fit this memory, which then fails."""
        ids = [int(each) for each in chunk_ids]
        rows = self._rows
        if rows is None or len(ids) != count or any(not 0 <= each < self._row_count for each in ids):
            _LOG.error("a job names %d blocks and %d rows of %d", count, len(ids), self._row_count)
            return None
        return [memoryview(rows[each]).cast("B") for each in ids]

    def _loading(self, names: Sequence[str], rows: Sequence[memoryview]) -> Callable[[], list[bool]]:
        return lambda: self._link.load(names, rows)

    def _storing(self, names: Sequence[str], rows: Sequence[memoryview]) -> Callable[[], list[bool]]:
        """What is known to be stored is left out, but for what could not be loaded: the store then tells what is wrong with it."""

        def run() -> list[bool]:
            known = self._link.run(names)  # another instance has computed the same
            stored = [index < known and name not in self._suspects for index, name in enumerate(names)]
            wanted = [index for index, is_there in enumerate(stored) if not is_there]
            told = self._link.store([NewChunk(names[index], rows[index]) for index in wanted])
            for index, is_there in zip(wanted, told, strict=True):
                stored[index] = is_there
            return stored

        return run

    def _result(self, ended: Finished) -> JobResult:
        keys = self._keys.pop(ended.job, [])
        copied = [key for key, is_there in zip(keys, ended.copied, strict=False) if is_there]
        is_whole = len(copied) == len(keys)
        if not is_whole:
            arrived = set(copied)
            missing = [key for key in keys if key not in arrived]
            self._counts[_LOAD_FAILURES if ended.is_load else _STORE_FAILURES] += len(missing)
            if ended.is_load:
                self._lookups.failed(missing)
                if len(self._suspects) < _SUSPECTS_MAX:
                    self._suspects.update(map(chunk_name, missing))
        if self._suspects:
            self._suspects.difference_update(map(chunk_name, copied))
        if ended.is_load:
            self._lookups.loaded(copied)
        else:
            self._lookups.stored(copied)
            if self._events is not None and copied:
                self._events.append(
                    OffloadingEvent(keys=copied, medium=Medium.STORAGE, removed=False, locality=self.locality)
                )
        return JobResult(
            job_id=ended.job,
            success=is_whole,
            successful_keys=tuple(copied) if ended.is_load and copied and not is_whole else None,
            transfer_time=ended.seconds,
            transfer_bytes=len(copied) * self._row_bytes,
        )


def chunk_name(key: bytes) -> str:
    """The foreign key of a block: its hash in hex, and the number of its KV cache group."""
    return f"{get_offload_block_hash(key).hex()}-g{get_offload_group_idx(key)}"


def _facts_of(spec: Any, row_bytes: int) -> EngineFacts:  # noqa: ANN401 - vLLM's OffloadingSpec
    """What vLLM's configuration fixes. A row's bytes do not depend on how heads are split where it is canonical, or has one copy of
    what all workers hold; else workers are counted, of which a row has all, side by side.

    `is_parallelism_agnostic` alone does not say so: it is right of files of one layer, and in a row each worker has its heads of
    all layers behind each other (`shared_offload_region.create_next_worker_view`, 0.33.0), which are other bytes for other sizes.
    """
    config = spec.config
    parallel, cache = config.parallel, config.cache
    is_free = config.replicated_layout or (config.canonical_layout and parallel.is_parallelism_agnostic)
    sizes = (1 if is_free else parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    groups = [[group.tokens_per_block, list(group.layer_names)] for group in config.groups]
    return EngineFacts(
        engine="vllm",
        model=config.model.name,
        chunk_tokens=max(1, config.groups[0].tokens_per_block * cache.blocks_per_chunk if config.groups else 1),
        others={
            "dtype": config.model.dtype,
            "hash_tokens": cache.tokens_per_hash,
            "blocks": cache.blocks_per_chunk,
            "sizes": "x".join(map(str, sizes)),
            "replicated": int(config.replicated_layout),
            "layout": _layout_of(config),
            "groups": fact_digest(groups),
            "bytes": row_bytes,
            # `groups` has the first stage's layers alone.
            **partition_fact(os.environ.get("VLLM_PP_LAYER_PARTITION", ""), parallel.pp_size),
        },
    )


def _layout_of(config: Any) -> str:  # noqa: ANN401 - vLLM's OffloadingConfig
    if not config.canonical_layout:
        return f"direct-{config.kv_cache_layout}"
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (  # noqa: PLC0415 - rarely needed
        canonical_format_id,
    )

    return str(canonical_format_id(config.kv_cache_layout))
