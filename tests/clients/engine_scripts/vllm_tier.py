"""vLLM's own tiering manager over a CPU memory of a few rows, with kvobj as its secondary tier; what a worker's GPU would copy is
written into and read from those rows.

Run in `.envs/engines`; see `command_lines` for how, and `engine_modules` for what of vLLM is there. Blocks are named by number.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import engine_modules
from command_lines import body_of, digest_of, serve

engine_modules.enter_vllm()

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402

SECONDS = 60.0
managers: dict[str, Any] = {}
specs: dict[str, Any] = {}
contexts: dict[tuple[str, str], Any] = {}


def key_of(block: int, group: int = 0) -> Any:  # noqa: ANN401 - vLLM's OffloadKey
    """vLLM's key of a block: a SHA-256 digest, and the group."""
    return make_offload_key(hashlib.sha256(f"block {block}".encode()).digest(), group)


def configure_logging() -> None:
    """As vLLM does when it starts."""
    import vllm.logger  # noqa: PLC0415

    vllm.logger._configure_vllm_root_logger()


def open_manager(
    name: str,
    tier: dict[str, object],
    *,
    rows: int,
    row_bytes: int,
    dtype: str = "bfloat16",
    model: str = "example/Model-8B",
    tensor: int = 1,
    pipeline: int = 1,
    partition: str = "",
    says_free: bool = False,
    canonical: bool = False,
    events: bool = False,
) -> dict[str, Any]:
    """A manager as `TieringOffloadingSpec` makes it from `kv_connector_extra_config`; what its tier says of itself. `says_free`:
    vLLM's own word that bytes do not depend on how it is split."""
    os.environ["VLLM_PP_LAYER_PARTITION"] = partition
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layers.0", "layers.1"), group_id=0),),
        worker_kv_bytes_per_block=row_bytes // (tensor * pipeline),
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": rows * row_bytes, "secondary_tiers": [tier]},
        engine_id=f"kvobj-test-{os.getpid()}-{name}",
        model=OffloadingModelConfig(name=model, dtype=dtype),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=tensor * pipeline,
            tp_size=tensor,
            pp_size=pipeline,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=says_free,
        ),
        canonical_layout=canonical,
        kv_cache_layout="LBNHC",
    )
    spec = TieringOffloadingSpec(config)
    definitions = spec.build_metric_definitions(config.extra_config)
    managers[name], specs[name] = spec.get_manager(), spec
    Path(f"/dev/shm/vllm_offload_{config.engine_id}.mmap").unlink()  # stays mapped; this process may be killed
    (tier_info,) = [info for info in managers[name].config_info() if "kvobj_namespace" in info]
    return {"info": dict(tier_info), "metrics": sorted(each for each in definitions if "kvobj" in each)}


def context_of(name: str, request: str) -> Any:  # noqa: ANN401 - vLLM's ReqContext
    """One context for all calls of a request, made known to the manager at its first one."""
    if (name, request) not in contexts:
        contexts[name, request] = ReqContext(req_id=request)
        with managers[name].lock:
            managers[name].on_new_request(contexts[name, request])
    return contexts[name, request]


def step(name: str) -> None:
    """The end of a scheduler's step."""
    with managers[name].lock:
        managers[name].on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))


def settle(name: str) -> None:
    """Step until no transfer is under way."""
    until = time.monotonic() + SECONDS
    while True:
        step(name)
        with managers[name].lock:
            if not managers[name].has_pending_work():
                return
        if time.monotonic() > until:
            raise TimeoutError("transfers did not end")
        time.sleep(0.002)


def row_of(name: str, row: int) -> memoryview:
    """The bytes of a row of the CPU memory."""
    import numpy as np  # noqa: PLC0415

    return memoryview(np.asarray(managers[name].primary_tier.get_kv_memoryview())[row]).cast("B")


def store(name: str, request: str, blocks: list[int], *, settled: bool = True) -> dict[str, Any]:
    """What a worker does after computing blocks: room in the CPU memory, the copy, completion; then the cascade to the tier."""
    manager, context = managers[name], context_of(name, request)
    keys = [key_of(block) for block in blocks]
    with manager.lock:
        prepared = manager.prepare_store(keys, context)
        if prepared is None:
            return {"stored": [], "evicted": 0}
        by_key = {key_of(block): block for block in blocks}
        rows = [int(row) for row in prepared.store_spec.chunk_ids]
        for key, row in zip(prepared.keys_to_store, rows, strict=True):
            view = row_of(name, row)
            view[:] = body_of(len(view), by_key[key])
        manager.complete_store(prepared.keys_to_store, context)
    if settled:
        settle(name)
    return {"stored": [by_key[key] for key in prepared.keys_to_store], "evicted": len(prepared.evicted_keys)}


def look_up(name: str, request: str, blocks: list[int], *, until: str = "") -> dict[str, Any]:
    """Ask for blocks step by step, as a waiting request does, until each is a hit or a miss in vLLM's own words, or what `until`
    says; what they are, how many steps it took, and the longest that a call of the manager took."""
    manager, context = managers[name], context_of(name, request)
    deadline, taken, longest = time.monotonic() + SECONDS, 0, 0.0
    while True:
        results: list[Any] = []
        for block in blocks:
            began = time.perf_counter()
            with manager.lock:
                results.append(manager.lookup(key_of(block), context))
            longest = max(longest, time.perf_counter() - began)
        answer = {"results": [result.name for result in results], "steps": taken, "longest": longest}
        if until and all(result.name == until for result in results):
            return answer  # in the middle of a step: nothing that follows from it has been sent
        step(name)
        taken += 1
        if all(result in (LookupResult.HIT, LookupResult.MISS) for result in results):
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"still {[result.name for result in results]}")
        time.sleep(0.002)


def ask(name: str, request: str, blocks: list[int]) -> int:
    """Ask for blocks within a step that others ask in, too: how many are not answered yet."""
    manager, context = managers[name], context_of(name, request)
    with manager.lock:
        return [manager.lookup(key_of(block), context) for block in blocks].count(LookupResult.RETRY)


def read(name: str, request: str, blocks: list[int]) -> list[str]:
    """Digests of blocks that are hits, as a worker would load them to the GPU."""
    manager, context = managers[name], context_of(name, request)
    keys = [key_of(block) for block in blocks]
    with manager.lock:
        spec = manager.prepare_load(keys, context)
        digests = [digest_of(row_of(name, int(row))) for row in spec.chunk_ids]
        manager.complete_load(keys, context)
    return digests


def finish(name: str, request: str) -> None:
    """The request has ended."""
    with managers[name].lock:
        managers[name].on_request_finished(contexts.pop((name, request)))


def reset(name: str) -> None:
    """Empty the CPU memory, as sleep and a change of weights do: waits for what is being copied."""
    with managers[name].lock:
        managers[name].reset_cache()
        managers[name].on_reset_flushed()


def report(name: str) -> dict[str, Any]:
    """The link's own account."""
    told: dict[str, Any] = managers[name].secondary_tiers[0].report()
    return told


def stats(name: str) -> dict[str, float]:
    """What vLLM would export since the last call."""
    with managers[name].lock:
        told = managers[name].get_stats()
    return dict(told.reduce()) if told is not None else {}


def events(name: str) -> list[dict[str, Any]]:
    """KV events of the tiers since the last call."""
    with managers[name].lock:
        return [
            {"medium": event.medium.name, "keys": len(event.keys), "removed": event.removed}
            for event in managers[name].take_events()
        ]


def misfit(name: str, chunk_ids: list[int], blocks: list[int]) -> list[bool]:
    """A load job that does not fit the CPU memory, given to the tier itself: whether it succeeded."""
    import numpy as np  # noqa: PLC0415

    tier = managers[name].secondary_tiers[0]
    job = TransferJob(
        job_id=1_000_000,
        keys=[key_of(block) for block in blocks],
        chunk_ids=np.array(chunk_ids, dtype=np.int32),
        is_promotion=True,
        req_context=ReqContext(req_id="misfit"),
    )
    tier.submit_load(job)
    tier.drain_jobs()
    return [result.success for result in tier.get_finished_jobs()]


def close(name: str) -> None:
    """End it, as vLLM does."""
    managers.pop(name).shutdown()


if __name__ == "__main__":
    serve(
        {
            "configure_logging": configure_logging,
            "open": open_manager,
            "store": store,
            "look_up": look_up,
            "ask": ask,
            "read": read,
            "finish": finish,
            "settle": settle,
            "reset": reset,
            "report": report,
            "stats": stats,
            "events": events,
            "misfit": misfit,
            "close": close,
        }
    )
    for opened in list(managers):
        close(opened)
    os._exit(0)
