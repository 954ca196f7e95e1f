"""Hashes every copy of an object again, and replaces a bad copy by a good one: for scrubs and `kvobj-admin verify`.

What lies on the remote is not read for that, which would cost money and a network: that it is there is what the node's directory
says, and whether it is whole is found by who reads it. A bad copy here is replaced from there, and a copy there that a reader has
found bad is read once more and then replaced from a good one here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from kvobj.arena import PinnedFrame
from kvobj.catalog.rows import BlobRef, ObjectRow
from kvobj.errors import CorruptionError, KvobjError
from kvobj.ids import BlobId
from kvobj.tiers.corrupt_blobs import CorruptBlobs
from kvobj.tiers.in_use import BlobsInUse
from kvobj.tiers.layered_home import RemoteBlobs
from kvobj.tiers.protocol import BlobNames, Tier
from kvobj.tiers.verification import check_frame
from kvobj.tiers.verified import RunOnPool

_GONE: Final = "no tier holds it"


class MarkedTier(Tier, Protocol):
    """A cache tier that can be told that it holds the only copy of a blob."""

    def mark_dirty(self, blob_id: BlobId) -> None:
        """From now on the blob is not evicted."""
        ...

    def mark_clean(self, blob_id: BlobId, *, remember: bool = False) -> None:
        """The blob has a copy below. `remember`: a restart is to know it without asking."""
        ...


@dataclass(frozen=True, slots=True)
class RemoteCopies:
    """The remote, for who looks after copies. `read` is checked and decoded; `replace` puts a frame there in the place of the one
    that is; `corrupt` are blobs that readers found bad there."""

    read: Tier
    blobs: RemoteBlobs
    corrupt: CorruptBlobs
    replace: Callable[[BlobId, PinnedFrame, BlobNames], Awaitable[None]]


@dataclass(slots=True)
class CopyCheck:
    """What was found. `problem`: no copy of some blob is good. `is_lost`: nor is there one that could not be read just now.
    `replaced`: copies on the remote that were put again."""

    hashed_bytes: int = 0
    mismatches: int = 0
    repaired: int = 0
    replaced: int = 0
    problem: str | None = None
    is_lost: bool = False


@dataclass(slots=True)
class _Copies:
    """What the tiers of this node have of a blob: one that checked out, those that did not, those that could not be read."""

    good: Tier | None = None
    bad: list[tuple[Tier, str]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


class Copies:
    """See the module's text. `settled` gives a row with its digest, waiting for it where it is still being computed."""

    def __init__(
        self,
        *,
        cache: MarkedTier,
        home: Tier,
        run: RunOnPool,
        in_use: BlobsInUse,
        corrupt: CorruptBlobs,
        settled: Callable[[ObjectRow], Awaitable[ObjectRow]],
        remote: RemoteCopies | None = None,
    ) -> None:
        self._cache = cache
        self._home = home
        self._run = run
        self._in_use = in_use
        self._corrupt = corrupt
        self._settled = settled
        self._remote = remote

    async def check(self, row: ObjectRow) -> CopyCheck:
        """Hash the row's blobs in every tier that holds them. Nothing of them is reaped meanwhile."""
        held = row.blob_ids
        self._in_use.hold(held)
        found = CopyCheck()
        try:
            for blob in await self._lasting(row):
                await self._check_blob(blob, BlobNames(row.bucket, row.key), found)
                if found.problem is None:
                    continue
                if row.lossy is not None and blob.blob_id == row.lossy.blob_id:
                    # A bad copy loses no chunk whose bytes are still there: they were checked before it.
                    found.is_lost = found.is_lost and await self._are_gone(row)
                break
        finally:
            self._in_use.release(held)
        return found

    async def _lasting(self, row: ObjectRow) -> list[BlobRef]:
        """The blobs that some tier has to hold. Of a chunk with a lossy copy that is the copy, and the bytes where they are
        still."""
        blobs = list((await self._settled(row)).blobs)
        copy = row.lossy
        if copy is None:
            return blobs
        lossy = BlobRef(copy.blob_id, copy.plain_bytes, copy.frame_bytes, copy.digest, copy.codec)
        return [lossy] if await self._are_gone(row) else [*blobs, lossy]

    async def _are_gone(self, row: ObjectRow) -> bool:
        """Of a chunk with a lossy copy, which is all that lies at home: whether memory has let its bytes go."""
        return bool(await self._cache.missing([BlobId(blob.blob_id) for blob in row.blobs]))

    async def _check_blob(self, blob: BlobRef, names: BlobNames, found: CopyCheck) -> None:
        blob_id = BlobId(blob.blob_id)
        copies = await self._check_here(blob, found)
        remote = None if self._remote is None or self._remote.blobs.find(blob_id) is None else self._remote
        good = copies.good
        is_sound_there = remote is not None and await self._is_sound_there(remote, blob, found)
        if remote is not None and good is not None and not is_sound_there:
            await self._replace_there(remote, good, blob_id, names, found)
        if good is None and remote is not None and is_sound_there:
            good = remote.read  # a bad copy here, or none, which is as it should be
        if good is None:
            found.problem = "; ".join([*(problem for _, problem in copies.bad), *copies.unread]) or _GONE
            found.is_lost = not copies.unread and remote is None
            return
        for tier, problem in copies.bad:
            if await self._repair(tier, good, blob_id, names):
                found.repaired += 1
            else:
                found.problem = f"{problem}; could not be repaired"

    async def _check_here(self, blob: BlobRef, found: CopyCheck) -> _Copies:
        """Hash the copies in this node's tiers."""
        blob_id = BlobId(blob.blob_id)
        copies = _Copies()
        tiers: tuple[Tier, ...] = (self._cache, self._home)
        for tier in tiers:
            try:
                frame = None if await tier.missing([blob_id]) else await tier.get(blob_id)
                if frame is None:
                    continue
                problem = await self._hash(frame, blob)
            except CorruptionError as error:
                problem = str(error)
            except (
                KvobjError
            ) as error:  # the medium fails, or there is no room to read into: nothing is known of the copy
                copies.unread.append(f"{tier.name}: {error}")
                continue
            found.hashed_bytes += blob.plain_bytes
            if problem is None:
                copies.good = tier
            else:
                found.mismatches += 1
                copies.bad.append((tier, f"{tier.name}: {problem}"))
        return copies

    async def _is_sound_there(self, remote: RemoteCopies, blob: BlobRef, found: CopyCheck) -> bool:
        """Whether the copy on the remote is good for all that is known. One that a reader has found bad is read once more: it may
        have been its way here. While it cannot be read nothing else is known of it."""
        blob_id = BlobId(blob.blob_id)
        if blob_id not in remote.corrupt:
            return True
        try:
            frame = await remote.read.get(blob_id)
            if frame is None:
                return False
            found.hashed_bytes += blob.plain_bytes
            is_sound = await self._hash(frame, blob) is None
        except KvobjError:
            return False
        if is_sound:
            remote.corrupt.forget(blob_id)
        return is_sound

    async def _replace_there(
        self, remote: RemoteCopies, good: Tier, blob_id: BlobId, names: BlobNames, found: CopyCheck
    ) -> None:
        """Put the good copy in the place of the one on the remote; where that does not answer, the next pass comes to it again."""
        found.mismatches += 1
        try:
            frame = await good.get(blob_id)
            if frame is None:
                return
            try:
                await frame.complete()
                await remote.replace(blob_id, frame, names)
            finally:
                frame.release()
        except KvobjError as error:
            found.problem = f"remote: bad, and could not be replaced: {error}"
            return
        remote.corrupt.forget(blob_id)
        found.replaced += 1

    async def _hash(self, frame: PinnedFrame, blob: BlobRef) -> str | None:
        try:
            await frame.complete()
            return await self._run(partial(check_frame, frame.view, plain_bytes=blob.plain_bytes, digest=blob.digest))
        finally:
            frame.release()

    async def _repair(self, bad: Tier, good: Tier, blob_id: BlobId, names: BlobNames) -> bool:
        """Put the good copy where the bad one is, under the same blob id: the bytes are the ones that it has always meant."""
        try:
            frame = await good.get(blob_id)
            if frame is None:
                return False
            try:
                await frame.complete()
                if bad is self._home:
                    # Until the home tier has the blob again, the only copy must not be evicted.
                    self._cache.mark_dirty(blob_id)
                await bad.delete([blob_id])
                await bad.put(blob_id, frame, names)
            finally:
                frame.release()
        except KvobjError:
            return False
        self._cache.mark_clean(blob_id)
        self._corrupt.forget(blob_id)
        return True
