"""What class `shared` means to who writes: whether it can be had, that the room in the queue is there, and the wait until it is
reached.

A write of class `shared` is one of class `local` that then waits (design §4.7). Asked for by name it is had or refused: before the
body, where the remote is known to be away, and otherwise when the deadline has passed; the object is there then, of class `local`,
and goes up later. Where it is merely the bucket's default, the write falls to `local` instead and says so.

A chunk is found with its ancestors or not at all, so it is shared once they are: those that are not are uploaded with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from enum import Enum
from typing import Final, Protocol, TypeAlias

import msgspec

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.remote_protocol import QueueReason
from kvobj.catalog.rows import BucketRow, Durability, ObjectRow
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.errors import BusyError, KvobjError, NotSharedError
from kvobj.store.remote_room import QueueRoom
from kvobj.store.remote_uploads import Journal, RemoteUploads

REMOVAL_SECONDS: Final = 2.0
"""How long who removes something waits for the remote to be told of it."""
_GRACE_SECONDS: Final = 1.0
"""For what is done about a wait whose own deadline has passed."""
_CHAINS_MAX: Final = 65_536
_ANCESTORS_A_TURN: Final = 64


class WriteDown(Protocol):
    """See `WriteBehind.write_down_now`."""

    async def __call__(self, rows: Sequence[ObjectRow], *, lossless: bool) -> None:
        """Rows of class `memory` become rows of class `local`."""
        ...


class Sharing(Enum):
    """Whether a write waits for the remote, and what becomes of it where that is in vain."""

    NONE = "none"
    WISHED = "wished"
    REQUIRED = "required"


class SharedWrites:
    """See the module's text. Event-loop-only.

    `refusal`: why nothing can become SHARED now, "" where it can; `absence`: why waiting for the remote is in vain. `settle` gives
    a row of class `memory` its digest, and `write_down` takes rows to class `local` (`WriteBehind.write_down_now`). `waiting_max`:
    how many writes may wait at a time, and how many removals, so that a slow remote leaves requests' slots to others.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        uploads: RemoteUploads,
        room: QueueRoom,
        journal: Journal,
        refusal: Callable[[], str],
        absence: Callable[[], str] | None = None,
        settle: Callable[[ObjectRow], Awaitable[ObjectRow]],
        write_down: WriteDown,
        deadline_seconds: float,
        waiting_max: int,
        log: logging.Logger,
    ) -> None:
        self.room = room
        self._catalog = catalog
        self._uploads = uploads
        self._journal = journal
        self._refusal = refusal
        self._absence = refusal if absence is None else absence
        self._settle = settle
        self._write_down = write_down
        self._deadline_seconds = deadline_seconds
        self._waiting_max = waiting_max
        self._waiting = 0
        self._removing = 0
        self._waits: set[asyncio.Timeout] = set()
        self._log = log
        # First blobs of chunks that were seen SHARED with all their ancestors. A chunk's ancestors never change while it lives, and
        # a blob id never means anything else, so this is true for ever.
        self._whole_chains: set[bytes] = set()

    def hurry(self, seconds: float) -> None:
        """The process ends: nobody waits for the remote any longer than this, now or from here on."""
        self._deadline_seconds = min(self._deadline_seconds, seconds)
        latest = asyncio.get_running_loop().time() + seconds
        for wait in self._waits:
            ends = wait.when()
            if not wait.expired() and (ends is None or ends > latest):
                wait.reschedule(latest)

    @asynccontextmanager
    async def _deadline(self, seconds: float) -> AsyncIterator[None]:
        async with asyncio.timeout(seconds) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    # -- before the body -----------------------------------------------------------------------------------------
    @staticmethod
    def sharing(bucket: BucketRow, durability: Durability, *, by_name: bool) -> Sharing:
        """What a write of this class is to do. `by_name`: its writer said so."""
        if durability is not Durability.SHARED:
            return Sharing.NONE
        return Sharing.REQUIRED if by_name or bucket.durability is not Durability.SHARED else Sharing.WISHED

    def check(self, sharing: Sharing) -> None:
        """Refuse what cannot be had now, before anything of it is stored. `NotSharedError`; `BusyError` where too many wait."""
        if sharing is not Sharing.REQUIRED:
            return
        refusal = self._refusal()
        if refusal:
            raise NotSharedError("class shared cannot be had now, and nothing was stored", cause=refusal)
        if self._waiting >= self._waiting_max:
            raise BusyError("too many writes wait for the remote tier", waiting=self._waiting)

    @staticmethod
    def must_queue(bucket: BucketRow, sharing: Sharing) -> bool:
        """Whether the write's object goes into the queue whatever becomes of it, so that it needs room there."""
        return (
            sharing is not Sharing.NONE or bucket.remote is RemoteRule.ALWAYS or bucket.durability is Durability.SHARED
        )

    async def replacing(self, row: ObjectRow, sharing: Sharing, *, owns_blobs: bool = True) -> ObjectRow:
        """The row to be committed for one whose bytes are at home. Where a row of class SHARED stands under its key, one that
        becomes it any moment, or one of class `memory`, which may lie over such a row, the new one's bytes go to the remote first,
        and it is committed as SHARED in one step: a node that is lost in between must not take the old object with it, which was
        promised to outlive it. `NotSharedError` where that fails and class shared was asked for by name: the old object stands.
        `concluded` is to be told of the commit's end.

        `owns_blobs`: nobody else may ever name the row's blobs. Those of an upload's parts may be another Complete's, too."""
        if sharing is Sharing.NONE or (sharing is Sharing.WISHED and self._refusal()):
            return row
        (live,) = await self._catalog.lookup(row.bucket, [row.key])
        if live is None or row.parent is not None or not self._is_promised(live):
            return row
        try:
            async with self._deadline(self._deadline_seconds):
                await self._uploads.put(row, owns_blobs=owns_blobs)
        except (KvobjError, TimeoutError) as error:
            if sharing is Sharing.REQUIRED:
                raise NotSharedError(
                    "class shared cannot be had now, and nothing was stored", cause=str(error)
                ) from error
            self._log.warning("class shared was not reached: %s", error)
            return row
        return msgspec.structs.replace(row, durability=Durability.SHARED)

    def _is_promised(self, live: ObjectRow) -> bool:
        """Whether the row's writer has been told of class shared, or may be before another row takes its place; of a row of class
        `memory`, whether one may lie below it that goes with it."""
        return live.durability is not Durability.LOCAL or self._catalog.remote_queue.find(live) is not None

    def concluded(self, row: ObjectRow) -> None:
        """The commit of what `replacing` returned has ended, in whatever way."""
        self._uploads.concluded(row)

    # -- after the commit ----------------------------------------------------------------------------------------
    async def reached(self, rows: Sequence[ObjectRow], sharing: Sharing) -> list[ObjectRow]:
        """The live rows as they are once the wait is over, each with the class that was reached. `NotSharedError` where class
        shared was asked for by name and one is not there."""
        if sharing is Sharing.NONE or not rows:
            return list(rows)
        if sharing is Sharing.WISHED and (self._refusal() or self._waiting >= self._waiting_max):
            return list(rows)
        found = list(rows)
        self._waiting += 1
        try:
            async with self._deadline(self._deadline_seconds + _GRACE_SECONDS):
                found = await self._shared(rows)
        except TimeoutError:
            pass
        except KvobjError as error:
            self._log.warning("class shared was not reached: %s", error)
        finally:
            self._waiting -= 1
        behind = [row for row in found if row.durability is not Durability.SHARED]
        if behind and sharing is Sharing.REQUIRED:
            raise NotSharedError(
                "what was written is stored, but not on the remote tier yet",
                reached=behind[0].durability.value,
                objects=len(behind),
            )
        return found

    def committed(self, row: ObjectRow) -> None:
        """A row was committed: one of class SHARED (`replacing`) needs no upload, and gc is told of it as of those that did."""
        if row.durability is Durability.SHARED:
            self._uploads.note_shared(row)

    async def _shared(self, rows: Sequence[ObjectRow]) -> list[ObjectRow]:
        needed: dict[_Name, ObjectRow] = {}
        for row in rows:
            await self._add_chain(row, needed)
        await self._take_to_local(needed, {_name(row) for row in rows})
        waiting = {name: row for name, row in needed.items() if row.durability is Durability.LOCAL}
        await self._queue(list(waiting.values()))
        there = {name for name, row in needed.items() if row.durability is Durability.SHARED}
        if waiting:
            wait_shared, seconds = self._uploads.wait_shared, self._deadline_seconds
            reached = await asyncio.gather(*[wait_shared(row, deadline_seconds=seconds) for row in waiting.values()])
            there.update(name for name, each in zip(waiting, reached, strict=True) if each is Durability.SHARED)
        elif not await self._is_told(self._deadline_seconds):
            # They are SHARED, but the manifest that says so is still on its way.
            return [_of_class(row, Durability.LOCAL) for row in rows]
        whole = _whole_chains(needed, there)
        self._remember([needed[name] for name in whole])
        return [_of_class(row, Durability.SHARED) if _name(row) in whole else _behind(row, needed) for row in rows]

    async def _add_chain(self, row: ObjectRow, needed: dict[_Name, ObjectRow]) -> None:
        """The row, and of its ancestors those that are not known to be shared with all of theirs."""
        at: ObjectRow | None = row
        seen = 0
        while at is not None and _name(at) not in needed:
            needed[_name(at)] = at
            if not at.parent or at.blobs[0].blob_id in self._whole_chains:
                return
            (at,) = await self._catalog.lookup(at.bucket, [at.parent])
            seen += 1
            if seen % _ANCESTORS_A_TURN == 0:
                await asyncio.sleep(0)

    async def _take_to_local(self, needed: dict[_Name, ObjectRow], asked: AbstractSet[_Name]) -> None:
        """Write down what is in memory: ancestors as their namespace has it, the rows themselves in their very bytes, as class
        `local` promises them."""
        in_memory = [row for row in needed.values() if row.durability is Durability.MEMORY]
        if not in_memory:
            return
        settled = [await self._settle(row) for row in in_memory]
        for lossless in (False, True):
            some = [row for row in settled if (_name(row) in asked) is lossless]
            if some:
                await self._write_down(some, lossless=lossless)
        for row in in_memory:
            (live,) = await self._catalog.lookup(row.bucket, [row.key])
            if live is not None and live.blob_ids[:1] == row.blob_ids[:1]:
                needed[_name(row)] = live

    async def _queue(self, rows: Sequence[ObjectRow]) -> None:
        """Rows that the commit has not queued: they were there before."""
        queue = self._catalog.remote_queue
        unqueued = [row for row in rows if queue.find(row) is None]
        if unqueued:
            async with self.room.of(sum(row.size_bytes for row in unqueued)):
                await queue.add(unqueued, QueueReason.SHARED)

    async def _is_told(self, timeout_seconds: float) -> bool:
        return await self._journal.settled(self._catalog.outbox.position, timeout_seconds=timeout_seconds)

    def _remember(self, rows: Sequence[ObjectRow]) -> None:
        chunks = [row.blobs[0].blob_id for row in rows if row.parent is not None and row.blobs]
        if len(self._whole_chains) + len(chunks) > _CHAINS_MAX:
            self._whole_chains.clear()
        self._whole_chains.update(chunks)

    # -- removal -------------------------------------------------------------------------------------------------
    async def removed(self, bucket: str | None) -> None:
        """Somebody is about to be told that a bucket, or something of it, is not there (None: a user): wait a little for the remote
        to be told of all that was ever removed from it, so that it stays removed when the node is lost right now. Of all, and not
        of this removal alone: a DELETE that is repeated finds nothing to remove, one of a row of class `memory` also takes away the
        row of class SHARED below it, and one of what has replaced a SHARED row means that, too. Where nothing is untold nothing is
        waited for. That the remote will be told is durable already, so nothing of this is an error."""
        outbox = self._catalog.outbox
        position = outbox.position if bucket is None else outbox.removals_of(bucket)
        if not position or self._removing >= self._waiting_max or self._absence():
            return
        self._removing += 1
        try:
            await self._journal.settled(position, timeout_seconds=REMOVAL_SECONDS)
        except KvobjError as error:
            self._log.info("the remote tier was not told of a removal yet: %s", error)
        finally:
            self._removing -= 1


_Name: TypeAlias = tuple[str, str]


def _name(row: ObjectRow) -> _Name:
    return row.bucket, row.key


def _of_class(row: ObjectRow, durability: Durability) -> ObjectRow:
    return row if row.durability is durability else msgspec.structs.replace(row, durability=durability)


def _behind(row: ObjectRow, needed: Mapping[_Name, ObjectRow]) -> ObjectRow:
    """A row that is not as well off as its class may say: its chain is local."""
    now = needed.get(_name(row), row)
    return _of_class(row, Durability.LOCAL if now.durability is Durability.SHARED else now.durability)


def _whole_chains(needed: Mapping[_Name, ObjectRow], there: AbstractSet[_Name]) -> set[_Name]:
    """Those of the rows that are there with all of their ancestors among the rows."""
    whole: dict[_Name, bool] = {}
    for name in needed:
        path: list[_Name] = []
        at: _Name | None = name
        while at is not None and at in needed and at not in whole:
            path.append(at)
            row = needed[at]
            at = (row.bucket, row.parent) if row.parent else None
        is_whole = True if at is None or at not in needed else whole[at]
        for each in reversed(path):
            is_whole = is_whole and each in there
            whole[each] = is_whole
    return {name for name, is_whole in whole.items() if is_whole}
