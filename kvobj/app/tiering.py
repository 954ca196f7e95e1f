"""Composes the tiers: what checks, meters, shares and decodes around dram, nvme and, where configured, hbm and the remote, and what
encodes for them.

Readers see dram, then hbm, then nvme, then the remote. What is read from the remote rises into dram as anything does, and into nvme
where that is worth its room (`gc.promotion`), in the form in which it lies; both beside the reader, who has its bytes as they
arrive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final, TypedDict

from kvobj.app.hbm import open_hbm
from kvobj.arena import Arena, PinnedFrame
from kvobj.catalog.lmdb import LmdbCatalog
from kvobj.catalog.rows import ObjectRow
from kvobj.clock import Clock
from kvobj.config.settings import Settings
from kvobj.errors import KvobjError
from kvobj.gc.promotion import Promotions
from kvobj.ids import BlobId
from kvobj.metrics import Metrics
from kvobj.store.profile_shelf import ProfileShelf
from kvobj.store.transcoding import Transcoder
from kvobj.store.transcoding_hbm import HbmCodings
from kvobj.store.transcoding_rules import CodingRules
from kvobj.tiers.cascade import Cascade
from kvobj.tiers.coded import Coded, CodedHome, ProfileOf
from kvobj.tiers.coded_blobs import CodecSums, CodedBlobs, codec_families
from kvobj.tiers.coded_cache import CodedCache
from kvobj.tiers.coded_demotion import DemotingFrames
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.decode_turns import DecodeTurns
from kvobj.tiers.dram import DramTier
from kvobj.tiers.hbm import HbmTier
from kvobj.tiers.instruments import TierInstruments
from kvobj.tiers.layered_home import LayeredHome
from kvobj.tiers.metered import Metered
from kvobj.tiers.nvme import NvmeTier
from kvobj.tiers.pool_runs import to_its_end
from kvobj.tiers.protocol import BlobNames, Tier
from kvobj.tiers.remote.directory import RemoteCodings, RemoteDirectory
from kvobj.tiers.remote.located import Located
from kvobj.tiers.remote.names import parse_name
from kvobj.tiers.remote.tier import RemoteTier
from kvobj.tiers.reread import Reread
from kvobj.tiers.single_flight import SingleFlight
from kvobj.tiers.stored_frames import StoredTier
from kvobj.tiers.stored_home import LayeredIndex, StoredHome
from kvobj.tiers.verified import RunOnPool, Verified

CODEC_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class RemoteReading:
    """The remote as others use it. `read` is checked and decoded, `layered` is nvme with it below; both ask nothing of it that the
    directory knows. `corrupt`: blobs whose bytes there did not check out."""

    tier: RemoteTier
    directory: RemoteDirectory
    read: Tier
    checked: Tier
    layered: LayeredHome
    corrupt: CorruptBlobs
    promotions: Promotions

    def names_of(self, blob_id: BlobId) -> BlobNames | None:
        """What the remote calls the blob; None where it does not lie there, or its key is too long to be told in full."""
        return _names_of(self.directory, blob_id)


@dataclass(frozen=True, slots=True)
class Tiering:
    """The tiers as others use them, all showing plain frames: `read` for readers, `cache` and `home` for who puts and looks after
    copies, `local` for who reads what is in dram or nvme and brings nothing up; `checked` are dram, nvme and the remote as they
    hold their frames, checked."""

    read: Cascade
    cache: CodedCache
    home: CodedHome
    local: tuple[Tier, ...]
    checked: tuple[Tier, ...]
    remote: RemoteReading | None
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


async def make_tiering(  # noqa: PLR0915 - one list of tiers around tiers, in order
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
    remote: RemoteTier | None = None,
) -> Tiering:
    """Everything between the tiers and the store; closed by the stack. `read_object` gives a small object's bytes."""
    remote_corrupt = CorruptBlobs()
    staying = CorruptBlobs()  # those of nvme whose copy is a cache's, and was told of
    mending: set[asyncio.Task[None]] = set()

    def corrupt_in_dram(blob_id: BlobId) -> None:
        log.error("a frame in dram is corrupt blob_id=%s", blob_id.hex())
        if not dram.evict_corrupt(blob_id):
            corrupt.note(blob_id)

    def corrupt_in_nvme(blob_id: BlobId) -> None:
        _tell_once(log, "a frame in nvme is corrupt", blob_id, corrupt, staying)
        if remote is None or remote.directory.find(blob_id) is None or blob_id in remote_corrupt:
            corrupt.note(blob_id)
            return
        # A cache's copy: the next read brings up a good one. Were it noted, a chunk could be taken for lost.
        task = asyncio.create_task(_drop_copy(home, blob_id, staying, log), name="drop-corrupt-copy")
        mending.add(task)
        task.add_done_callback(mending.discard)

    def corrupt_in_remote(blob_id: BlobId) -> None:
        _tell_once(log, "a frame on the remote is corrupt, or was on its way", blob_id, remote_corrupt)
        remote_corrupt.note(blob_id)

    def corrupt_below(blob_id: BlobId) -> None:
        (corrupt_in_remote if nvme.frame_bytes(blob_id) is None else corrupt_in_nvme)(blob_id)

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
    home = CodedHome(metered_nvme, blobs=coded_blobs, **decoding)
    local: tuple[Tier, ...] = (read_dram, read_nvme)
    checked: tuple[Tier, ...] = (checked_dram, checked_nvme)
    stored_below = StoredTier(checked_nvme, coded_blobs)
    below_dram: Tier = read_nvme
    reading: RemoteReading | None = None
    coded_totals: dict[str, CodecSums] = {"dram": dram.coded_totals, "nvme": coded_blobs.totals}
    if remote is not None:
        coded_totals["remote"] = remote.directory
        metered_remote = Metered(remote, instruments=instruments, clock=clock)
        checked_remote = SingleFlight(
            Reread(
                Verified(
                    metered_remote,
                    run=run,
                    instruments=instruments,
                    on_corrupt=corrupt_in_remote,
                    on_verified=remote_corrupt.forget,
                ),
                corrupt=remote_corrupt,
            ),
            instruments=instruments,
        )
        codings = RemoteCodings(remote.directory)
        layered = LayeredHome(nvme, remote, blobs=remote.directory)
        promotions = Promotions(catalog, partial(_names_of, remote.directory))
        # Below what decodes, so that a blob rises as it lies.
        below = Cascade(
            StoredHome(checked_nvme, home=home, remote=codings),
            checked_remote,
            instruments=instruments,
            admission=promotions,
        )
        index = LayeredIndex(coded_blobs, codings, held=nvme)
        below_dram = Located(
            Coded(below, index=index, on_corrupt=corrupt_below, **decoding),
            remote=remote,
            is_nearer=lambda blob_id: nvme.frame_bytes(blob_id) is not None,
        )
        stored_below = StoredTier(below, index, known=layered)
        reading = RemoteReading(
            tier=remote,
            directory=remote.directory,
            read=Located(Coded(checked_remote, index=codings, on_corrupt=corrupt_in_remote, **decoding), remote=remote),
            checked=checked_remote,
            layered=layered,
            corrupt=remote_corrupt,
            promotions=promotions,
        )
        checked = (*checked, checked_remote)
    transcoder = Transcoder(arena=arena, run=run_codec, metrics=metrics)

    async def demote(frame: PinnedFrame, codec: str) -> PinnedFrame:
        return (await transcoder.demote(frame, codec, tier="reader")).frame

    stored = DemotingFrames((StoredTier(checked_dram, dram), stored_below), demote=demote)
    rules = CodingRules(catalog.namespaces, log=log, profile_of=profiles.get)
    hbm_codings = HbmCodings(rules)
    hbm = None
    if settings.hbm is not None:
        # Behind dram for readers of bytes: what dram holds is sent as it lies, and device memory has to be copied first.
        hbm = await open_hbm(settings.hbm, arena, coding_of=hbm_codings.of_blob, metrics=metrics, log=log)
        stack.push_async_callback(hbm.aclose)
        coded_totals["hbm"] = hbm.coded_totals
        shared_hbm = SingleFlight(Metered(hbm, instruments=instruments, clock=clock), instruments=instruments)
        below_dram = Cascade(shared_hbm, below_dram, instruments=instruments)
    metrics.add_families(lambda: codec_families(coded_totals))
    read = Cascade(read_dram, below_dram, instruments=instruments, stored=stored)
    stack.push_async_callback(read.aclose)
    stack.push_async_callback(_all_done, mending)
    stack.callback(stored.close)
    return Tiering(
        read=read,
        cache=CodedCache(dram, **decoding),
        home=home,
        local=local,
        checked=checked,
        remote=reading,
        hbm=hbm,
        hbm_codings=hbm_codings,
        rules=rules,
        profiles=profiles,
        transcoder=transcoder,
    )


def _tell_once(log: logging.Logger, what: str, blob_id: BlobId, *known: CorruptBlobs) -> None:
    """One line a blob, not one a read: a client may ask for it again and again."""
    if not any(blob_id in each for each in known):
        log.error("%s blob_id=%s", what, blob_id.hex())


def _names_of(directory: RemoteDirectory, blob_id: BlobId) -> BlobNames | None:
    """What the remote calls the blob; None where it does not lie there, or its key is too long to be told in full."""
    place = directory.find(blob_id)
    parsed = None if place is None else parse_name(place.name)
    return None if parsed is None or parsed[1] else parsed[0]


async def _drop_copy(home: Tier, blob_id: BlobId, staying: CorruptBlobs, log: logging.Logger) -> None:
    """Delete a cache's copy, which is `staying` until that has been done. The first failure is told, one line a blob."""
    was_staying = blob_id in staying
    staying.note(blob_id)
    try:
        await home.delete([blob_id])
    except KvobjError as error:
        if not was_staying:
            log.warning("a corrupt copy stays for now blob_id=%s: %s", blob_id.hex(), error)
    else:
        staying.forget(blob_id)


async def _all_done(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tuple(tasks))
