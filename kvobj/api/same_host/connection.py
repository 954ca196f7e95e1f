"""One connection of a same-host client: its token, its calls one after the other, and its end.

Whatever the end is (the client closed, died, stalls past its lease, sent what is no message, lost its rights), the order is: the
control page says that nothing of it holds any more, and only then pins and room are given back. Who checks the page after using
memory has therefore used what it took it for. Room in the arena that a trusted writer may still be writing into, since it stalls
and is not gone, is given back when its socket ends: the kernel ends that after the writer's memory.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvobj.api.kv.errors import error_value
from kvobj.api.kv_store import ChunkStore
from kvobj.api.same_host.hot_opens import HotOpened, HotOpens, nothing_ahead
from kvobj.api.same_host.message_socket import MessageSocket
from kvobj.api.same_host.reads import ExtentReads
from kvobj.api.same_host.rights import Grant, Grants, Rights
from kvobj.api.same_host.writes import ExtentWrites, StagingBudget
from kvobj.arena import Arena, PinnedFrame
from kvobj.arena.outside_writers import mark_writer
from kvobj.catalog.rows import ObjectRow
from kvobj.errors import AccessDeniedError, InvalidRequestError, KvobjError, UnavailableError
from kvobj.same_host.descriptors import control_page
from kvobj.same_host.messages import (
    DESCRIPTORS_MAX,
    HELLO_BYTES_MAX,
    REPLY_BYTES_MAX,
    REQUEST_BYTES_MAX,
    VERSION,
    Abandon,
    Commit,
    Committed,
    Failed,
    Hello,
    Open,
    Prepare,
    Prepared,
    Region,
    Regions,
    Release,
    Reply,
    Request,
    Reserve,
    Reserved,
    ReservedRoom,
    Stage,
    Staged,
    Welcome,
    decode_request,
    encode,
)
from kvobj.same_host.revocation import revoke
from kvobj.store.extents import ExtentLedger, PinnedBudget, WholeFrames
from kvobj.store.host_reads import HostReads
from kvobj.store.prepared import PreparedRooms

HELLO_SECONDS: Final = 5.0
AHEAD_REGIONS: Final = 16
"""A trusted writer is shown so many at once, 4 GiB, before it is given room in any: less than half a second of its background, and
8 MiB of page tables. Who has to look at pages for the first time while it copies takes twice as long."""
_OPEN: Final = frozenset({bytes((0x90 | fields, 2)) for fields in range(16)})
_RELEASE: Final = frozenset({bytes((0x90 | fields, 3)) for fields in range(16)})
"""How messages begin (msgpack: an array of so many fields, the tag)."""
_STALL_SECONDS: Final = 1.0
"""A stop waits so long for a writer that stalls."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What connections share."""

    store: WholeFrames
    hot_frame: Callable[[ObjectRow], PinnedFrame | None]
    reads: ExtentReads
    hot: HotOpens
    chunks: ChunkStore
    arena: Arena
    grants: Grants
    pinned: PinnedBudget
    host_reads: HostReads
    staging: StagingBudget
    prepared: PreparedRooms
    reserved_bytes_max: int
    executor: Executor | None
    reserve_seconds: float
    log: logging.Logger


class Connection:
    """See the module's text. Event-loop-only; `run` is its life."""

    def __init__(self, connection: socket.socket, parts: Parts, *, peer: tuple[int, int]) -> None:
        self._parts = parts
        self._peer = peer
        self._task: asyncio.Task[None] | None = None
        self._messages = MessageSocket(
            connection,
            bytes_max=HELLO_BYTES_MAX,
            on_end=self.end,
            answer_now=self._answer_now,
            answered=self._catch_up,
        )
        self._opened: HotOpened | None = None
        self._releases: list[bytes] = []
        self._grant: Grant | None = None
        self._ledger: ExtentLedger | None = None
        self._writes: ExtentWrites | None = None
        self._control = -1
        self._page: mmap.mmap | None = None
        self._regions: set[int] = set()
        self._is_ending = False

    @property
    def is_overdue(self) -> bool:
        """Whether its lease has run out, and it is not ended for that yet: it stalls, or its user may not go on."""
        return self._grant is not None and not self._is_ending and self._parts.grants.is_over(self._grant)

    @property
    def is_strange(self) -> bool:
        """Whether it is waited for who its client is: no token was accepted yet."""
        return self._grant is None and not self._is_ending

    def start(self, on_ended: Callable[[Connection], None]) -> None:
        """Serve it in a task of its own; `on_ended` is called when nothing of it is left."""
        self._task = asyncio.create_task(self._run(), name="same-host connection")
        self._task.add_done_callback(lambda _: on_ended(self))

    def end(self) -> None:
        """Revoke what it holds, now, and let its task end. Idempotent."""
        self._revoke()
        if self._task is not None and not self._is_ending:
            self._is_ending = True
            self._task.cancel()

    async def aclose(self) -> None:
        """End it, whatever its client does, and return when it has ended."""
        self.end()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=_STALL_SECONDS)
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        log = self._parts.log
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                await self._greet()
            while (request := await self._next()) is not None:
                await self._serve(request)
        except (InvalidRequestError, AccessDeniedError, UnavailableError, TimeoutError) as error:
            log.info("a same-host connection is ended pid=%d uid=%d reason=%s", *self._peer, str(error) or "no hello")
        except asyncio.CancelledError:
            return  # by `end`: what it was doing is undone below
        except Exception:  # the task's outermost handler: a defect ends this connection, not the server
            log.exception("a same-host connection met a defect pid=%d uid=%d", *self._peer)
        finally:
            await self._close()

    async def _next(self) -> Request | None:
        """The next request, whose bytes are kept no longer than it takes to read it; None at the end."""
        raw = await self._messages.read()
        return None if raw is None else decode_request(raw)

    async def _greet(self) -> None:
        request = await self._next()
        if request is None:
            raise UnavailableError("gone before its hello")
        if not isinstance(request, Hello):
            raise InvalidRequestError("the first message is a hello")
        grant = self._parts.grants.claim(request.token) if request.version == VERSION else None
        if grant is None:
            error = AccessDeniedError("the token is not good, or no longer")
            await self._send(_failed(error))
            raise error
        parts, rights = self._parts, grant.rights
        self._grant = grant
        self._messages.allow(REQUEST_BYTES_MAX)
        self._ledger = ExtentLedger(
            store=parts.store,
            arena=parts.arena,
            budget=parts.pinned,
            reads=parts.host_reads,
            lane=rights.lane,
            reserve_seconds=parts.reserve_seconds,
            hot_frame=parts.hot_frame,
        )
        self._writes = ExtentWrites(
            parts.chunks,
            parts.executor,
            parts.staging,
            parts.prepared,
            reserved_bytes_max=parts.reserved_bytes_max,
        )
        self._control, self._page = control_page()
        if rights.is_trusted and rights.may_write:
            # The first look at a page costs as much as a copy: it can be had before room is asked for.
            await self._show(parts.arena.shared_regions()[:AHEAD_REGIONS])
        await self._send(Welcome(VERSION, opens_ahead=True, prepares=True), (self._control,))
        parts.log.info(
            "same-host connection bucket=%s user=%s pid=%d uid=%d", rights.bucket.name, rights.user_id, *self._peer
        )

    def _answer_now(self, raw: bytes) -> bytes | None:
        """The answer to what needs no task (`Release`: an empty one); None for all else."""
        begins = raw[:2]
        if self._is_ending or self._grant is None:
            return None
        if begins in _RELEASE:
            self._releases.append(raw)  # who opens is not to wait for that
            return b""
        try:
            self._opened = self._open_now(raw, self._grant.rights) if begins in _OPEN else None
            return None if self._opened is None else encode(self._opened.reply)
        except InvalidRequestError:
            return None  # the task ends the connection
        except Exception:  # called while bytes are read: event loops would log it and leave the client waiting for ever
            self._parts.log.exception("a same-host connection met a defect pid=%d uid=%d", *self._peer)
            self.end()
            return b""

    def _open_now(self, raw: bytes, rights: Rights) -> HotOpened | None:
        request, ledger, hot = decode_request(raw), self._ledger, self._parts.hot
        if ledger is None or not isinstance(request, Open):
            return None
        opened = hot.open(request, rights, ledger, self._regions)
        if opened is None and self._releases:  # there may have been no room
            self._catch_up()
            opened = None if self._is_ending else hot.open(request, rights, ledger, self._regions)
        if opened is None and request.is_ahead:
            return nothing_ahead(request)
        return opened

    def _catch_up(self) -> None:
        """Do what an answer did not wait for."""
        opened, self._opened = self._opened, None
        try:
            if opened is not None:
                self._parts.hot.note(opened)
            if self._releases:
                self._let_go()
        except InvalidRequestError as error:
            self._parts.log.info("a same-host connection is ended pid=%d uid=%d reason=%s", *self._peer, str(error))
            self.end()
        except Exception:  # its answer is sent: only the log can be told, and what was opened ends with the connection
            self._parts.log.exception("a same-host connection met a defect pid=%d uid=%d", *self._peer)
            self.end()

    def _let_go(self) -> None:
        releases, self._releases = self._releases, []
        for raw in releases:
            request = decode_request(raw)
            if isinstance(request, Release) and self._ledger is not None:
                self._ledger.release(request.handles)

    async def _serve(self, request: Request) -> None:
        assert self._ledger is not None
        assert self._writes is not None
        if isinstance(request, Release):
            self._ledger.release(request.handles)
            return
        if isinstance(request, Abandon):
            await self._writes.abandon(request.batch)
            return
        if isinstance(request, Commit):
            await self._commit(request, self._writes)
            return
        descriptors: Sequence[int] = ()
        try:
            reply, descriptors = await self._answer(request, self._ledger, self._writes)
        except KvobjError as error:
            reply = _failed(error)
        await self._send(reply, descriptors)
        if isinstance(reply, Reserved):
            await self._writes.expect(reply.batch)

    async def _commit(self, request: Commit, writes: ExtentWrites) -> None:
        """The writer waits for its answer, and not for what the store does for itself behind a commit."""
        assert self._grant is not None
        is_told = False

        def tell(reply: Committed) -> None:
            nonlocal is_told
            self._messages.send_now(_encoded(reply))
            is_told = True

        try:
            await writes.commit(request, self._grant.rights, tell)
        except KvobjError as error:
            if is_told:
                raise  # a second answer would be taken for another question's
            await self._send(_failed(error))

    async def _answer(
        self, request: Request, ledger: ExtentLedger, writes: ExtentWrites
    ) -> tuple[Reply, Sequence[int]]:
        assert self._grant is not None
        rights = self._grant.rights
        match request:
            case Open(is_ahead=True):
                hot = self._parts.hot
                ahead = hot.open(request, rights, ledger, self._regions) or nothing_ahead(request)
                hot.note(ahead)
                return ahead.reply, ()
            case Open():
                opened = await self._parts.reads.open(request, rights, ledger)
                extents = [extent for extent in opened.extents if extent is not None]
                try:
                    await self._show([extent.region for extent in extents])
                except KvobjError:
                    # The client is told of a failure and of no handle: it could not let go.
                    ledger.release([extent.handle for extent in extents])
                    raise
                return opened, ()
            case Stage():
                descriptor, size_bytes = writes.stage(request.size_bytes, rights)
                return Staged(size_bytes), (descriptor,)
            case Reserve():
                batch, rooms = await writes.reserve(request, rights)
                try:
                    await self._give([room for room in rooms if room is not None])
                except KvobjError:
                    await writes.abandon(batch)
                    raise
                return Reserved(batch, rooms), ()
            case Prepare():
                return await self._prepared(request, writes), ()
            case _:
                raise InvalidRequestError("not a call that is answered here")

    async def _prepared(self, request: Prepare, writes: ExtentWrites) -> Prepared:
        """Nobody waits for it, so it does not fail: there are no rooms then."""
        assert self._grant is not None
        try:
            prepared = writes.prepare(request, self._grant.rights)
            await self._give(prepared.rooms)
        except KvobjError:
            writes.end_prepared()
            return Prepared(0, [])
        return prepared

    async def _give(self, rooms: Sequence[ReservedRoom]) -> None:
        """Let the client write into these."""
        for room in rooms:
            self._parts.arena.give_outside(room.region, room.offset, room.size_bytes)
        await self._show([room.region for room in rooms])

    async def _show(self, regions: Sequence[int]) -> None:
        """Hand over the descriptors of regions that the client has not got yet."""
        fresh = sorted(set(regions) - self._regions)
        for start in range(0, len(fresh), DESCRIPTORS_MAX):
            some = fresh[start : start + DESCRIPTORS_MAX]
            await self._show_some(some)
            self._regions.update(some)

    async def _show_some(self, regions: Sequence[int]) -> None:
        assert self._grant is not None
        arena, rights = self._parts.arena, self._grant.rights
        mode = os.O_RDWR if rights.is_trusted else os.O_RDONLY
        descriptors: list[int] = []
        told: list[Region] = []
        try:
            for number in regions:
                if rights.lane is not None:
                    arena.lend(number, rights.lane)
                path, size_bytes = arena.region_file(number)
                descriptors.append(os.open(path, mode | os.O_CLOEXEC))
                if rights.is_trusted:
                    mark_writer(descriptors[-1], arena.life)
                told.append(Region(number, size_bytes, arena.life if rights.is_trusted else 0))
            await self._send(Regions(told), descriptors)
        except OSError as error:
            raise UnavailableError("a region cannot be handed over", reason=str(error)) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _send(self, reply: Reply, descriptors: Sequence[int] = ()) -> None:
        await self._messages.send(_encoded(reply), descriptors)

    def _revoke(self) -> None:
        if self._page is not None:
            revoke(self._page)

    async def _close(self) -> None:
        self._is_ending = True
        self._revoke()
        try:
            if self._ledger is not None:
                self._ledger.close()
            if self._writes is not None:
                with suppress(asyncio.CancelledError):  # by a stop, which waits no longer
                    if self._writes.has_reserved:
                        self._writes.set_aside()
                        await self._messages.wait_end()
                with suppress(KvobjError):
                    await self._writes.aclose()
        finally:
            self._messages.close()
            if self._grant is not None:
                self._parts.grants.end(self._grant)
            if self._control >= 0:
                os.close(self._control)
                self._control = -1
            if self._page is not None:
                self._page.close()  # the client's own mapping keeps the word
                self._page = None


def _encoded(reply: Reply) -> bytes:
    message = encode(reply)
    if len(message) > REPLY_BYTES_MAX:
        raise InvalidRequestError("the reply would be too long", size_bytes=len(message))
    return message


def _failed(error: KvobjError) -> Failed:
    status, told = error_value(error)
    detail = told["detail"]
    assert isinstance(detail, dict)
    return Failed(status, str(told["code"]), str(told["message"]), detail)
