"""Composes the tiers: what checks, meters, shares and decodes around dram, nvme and, where configured, hbm, and what encodes for
them."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, TypedDict

from kvobj.app.hbm import open_hbm
from kvobj.arena import Arena, PinnedFrame
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.config.settings import Settings
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.store.profile_shelf import ProfileShelf
from kvobj.store.transcoding import Transcoder
from kvobj.store.transcoding_hbm import HbmCodings
from kvobj.store.transcoding_rules import CodingRules
from kvobj.tiers.cascade import Cascade
from kvobj.tiers.coded import Coded, CodedHome, ProfileOf
from kvobj.tiers.coded_blobs import CodedBlobs, codec_families
from kvobj.tiers.coded_cache import CodedCache
from kvobj.tiers.coded_demotion import DemotingFrames
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.decode_turns import DecodeTurns
from kvobj.tiers.dram import DramTier
from kvobj.tiers.hbm import HbmTier
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.metered import Metered
from kvobj.tiers.nvme import NvmeTier
from kvobj.tiers.pool_runs import to_its_end
from kvobj.tiers.protocol import Tier
from kvobj.tiers.single_flight import SingleFlight
from kvobj.tiers.stored_frames import StoredTier
from kvobj.tiers.verified import RunOnPool, Verified

CODEC_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Tiering:
    """The tiers as others use them, all showing plain frames: `read` for readers, `cache` and `home` for who puts and looks after
    copies; `checked` are dram and nvme as they hold their frames, checked."""

    read: Cascade
    cache: CodedCache
    home: CodedHome
    checked: tuple[Tier, ...]
    hbm: HbmTier | None
    hbm_codings: HbmCodings
    rules: CodingRules
    profiles: ProfileShelf
    transcoder: Transcoder


class _Decoding(TypedDict):
    """What every tier that decodes needs."""

    arena: Arena
    run: RunOnPool
    instruments: TierInstruments
    profile_of: ProfileOf
    turns: DecodeTurns


async def make_tiering(
    stack: AsyncExitStack,
    settings: Settings,
    *,
    arena: Arena,
    dram: DramTier,
    nvme: NvmeTier,
    coded_blobs: CodedBlobs,
    corrupt: CorruptBlobs,
    catalog: LmdbCatalog,
    read_object: Callable[[ObjectRow], Awaitable[bytes | None]],
    run: RunOnPool,
    instruments: TierInstruments,
    clock: Clock,
    metrics: Metrics,
    log: logging.Logger,
) -> Tiering:
    """Everything between the two tiers and the store; closed by the stack. `read_object` gives a small object's bytes."""

    def corrupt_in_dram(blob_id: BlobId) -> None:
        log.error("a frame in dram is corrupt blob_id=%s", blob_id)
        if not dram.evict_corrupt(blob_id):
            corrupt.note(blob_id)

    def corrupt_in_nvme(blob_id: BlobId) -> None:
        log.error("a frame in nvme is corrupt blob_id=%s", blob_id)
        corrupt.note(blob_id)

    # Memory is trusted but for what an earlier process left in it: that is hashed at its first read.
    checked_dram = Verified(
        Metered(dram, instruments=instruments, clock=clock),
        run=run,
        instruments=instruments,
        on_corrupt=corrupt_in_dram,
        on_verified=dram.mark_verified,
        needs_check=dram.needs_verification,
    )
    metered_nvme = Metered(nvme, instruments=instruments, clock=clock)
    checked_nvme = SingleFlight(
        Verified(metered_nvme, run=run, instruments=instruments, on_corrupt=corrupt_in_nvme), instruments=instruments
    )
    # Threads of their own: what waits to be hashed is in a client's way, what waits to be encoded is not.
    codec_executor = ThreadPoolExecutor(CODEC_THREADS, thread_name_prefix="codec")
    stack.callback(codec_executor.shutdown)
    run_codec = to_its_end(codec_executor)
    profiles = ProfileShelf(catalog=catalog, read=read_object, run=run_codec, clock=clock)
    decoding = _Decoding(
        arena=arena, run=run_codec, instruments=instruments, profile_of=profiles.get, turns=DecodeTurns()
    )
    read_dram = Coded(checked_dram, index=dram, on_corrupt=corrupt_in_dram, **decoding)
    read_nvme = CodedHome(checked_nvme, blobs=coded_blobs, on_corrupt=corrupt_in_nvme, **decoding)
    transcoder = Transcoder(arena=arena, run=run_codec, metrics=metrics)

    async def demote(frame: PinnedFrame, codec: str) -> PinnedFrame:
        return (await transcoder.demote(frame, codec, tier="reader")).frame

    stored = DemotingFrames((StoredTier(checked_dram, dram), StoredTier(checked_nvme, coded_blobs)), demote=demote)
    rules = CodingRules(catalog.namespaces, log=log, profile_of=profiles.get)
    hbm_codings = HbmCodings(rules)
    coded_totals = {"dram": dram.coded_totals, "nvme": coded_blobs.totals}
    hbm = None
    below_dram: Tier = read_nvme
    if settings.hbm is not None:
        # Behind dram for readers of bytes: what dram holds is sent as it lies, and device memory has to be copied first.
        hbm = await open_hbm(settings.hbm, arena, coding_of=hbm_codings.of_blob, metrics=metrics, log=log)
        stack.push_async_callback(hbm.aclose)
        coded_totals["hbm"] = hbm.coded_totals
        shared_hbm = SingleFlight(Metered(hbm, instruments=instruments, clock=clock), instruments=instruments)
        below_dram = Cascade(shared_hbm, read_nvme, instruments=instruments)
    metrics.add_families(lambda: codec_families(coded_totals))
    read = Cascade(read_dram, below_dram, instruments=instruments, stored=stored)
    stack.push_async_callback(read.aclose)
    stack.callback(stored.close)
    return Tiering(
        read=read,
        cache=CodedCache(dram, **decoding),
        home=CodedHome(metered_nvme, blobs=coded_blobs, **decoding),
        checked=(checked_dram, checked_nvme),
        hbm=hbm,
        hbm_codings=hbm_codings,
        rules=rules,
        profiles=profiles,
        transcoder=transcoder,
    )
