"""?events: what was stored and removed, as lines of JSON, from a number on; with `follow` for as long as the reader stays.

A reader is given pages of the log as fast as it takes them: nothing is buffered for it, and one that stays behind for longer than
the log is kept is told of the gap. While there is nothing to tell an empty line goes out every few seconds (white space between
values, as JSON lines allow), so that both ends notice when the other has vanished without a word.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

import msgspec

from kvobj.api.access.actions import Action
from kvobj.api.chunk_access import ChunkAccess, open_bucket
from kvobj.api.errors import S3Error
from kvobj.api.exchange import Exchange
from kvobj.api.message import Reply
from kvobj.api.operations import ReadEvents
from kvobj.api.users import UserDirectory
from kvobj.catalog.history_protocol import EventRow, EventType, History
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, Durability, UserRow
from kvobj.errors import BusyError
from kvobj.metrics import Metrics
from kvobj.store.places import DEFAULT_NAMESPACE

HEARTBEAT_SECONDS: Final = 10.0
FOLLOWERS_MAX: Final = 64
"""Streams that go on for ever; one more is told to come back later."""
PAGE_EVENTS: Final = 256
_VIEW_BYTES: Final = 64 * 1024

_TIERS: Final = {Durability.MEMORY: "dram", Durability.LOCAL: "nvme", Durability.SHARED: "remote"}
"""Where a chunk surely was when it was stored; which tiers hold copies later is no event."""

_encode = msgspec.json.Encoder().encode


class Events:
    """The handler of `?events`. `aclose` ends the streams that follow: a server calls it before it drains."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        followers_max: int = FOLLOWERS_MAX,
    ) -> None:
        self._catalog = catalog
        self._heartbeat_seconds = heartbeat_seconds
        self._followers_max = followers_max
        self._followers = 0
        self._stopped = asyncio.Event()

    @property
    def followers(self) -> int:
        """How many readers follow now."""
        return self._followers

    async def stream(self, exchange: Exchange, operation: ReadEvents) -> Reply:
        """Events with numbers above `after`, all that are there or also all to come. `x-kvobj-last-event` says how far the log had
        come: who wants only what is new starts there."""
        catalog = self._catalog
        access = await open_bucket(exchange, catalog, operation.bucket, action=Action.LIST_BUCKET)
        if access.bucket.kind is not BucketKind.KV:
            raise S3Error("InvalidRequest", "The KV API works on buckets of kind kv, and this one is ordinary.")
        await access.check_granted_any()
        if operation.follow:
            if self._followers >= self._followers_max:
                raise BusyError("too many readers follow the events", limit=self._followers_max)
            self._followers += 1
        last = catalog.history.last_sequence()
        after = operation.after or 0
        headers = [("content-type", "application/x-ndjson"), ("x-kvobj-last-event", str(last))]
        rights = ReaderRights(access, exchange.authentication.user, exchange.users)
        stream = EventStream(
            catalog.history,
            operation.bucket,
            rights,
            after=min(after, last),
            # A number that was never given comes from a log that was lost: nothing the reader knows can be relied on.
            gap=b"" if after <= last else _gap_line(1, last),
            until=None if operation.follow else last,
            stopped=self._stopped,
            heartbeat_seconds=self._heartbeat_seconds,
            on_close=self._leave if operation.follow else _nothing,
        )
        return exchange.reply(200, headers, stream)

    async def aclose(self) -> None:
        """End the streams that follow, as soon as their readers have taken what is on its way. Idempotent."""
        self._stopped.set()

    def _leave(self) -> None:
        self._followers -= 1


def register_followers(metrics: Metrics, events: Events) -> None:
    """The figure of readers that follow, of whatever process they come to."""
    metrics.gauge_of("kvobj_events_followers", "readers that follow the events now", lambda: events.followers)


class EventStream:
    """The body of a reply, a `BodyStream` of unknown length. `gap`: a line to begin with. `until`: the number at which it ends,
    None: never by itself. It ends with its bucket, or its reader's key, in any case."""

    def __init__(
        self,
        history: History,
        bucket: str,
        rights: ReaderRights,
        *,
        after: int,
        gap: bytes = b"",
        until: int | None,
        stopped: asyncio.Event,
        heartbeat_seconds: float,
        on_close: Callable[[], None],
    ) -> None:
        self._history = history
        self._bucket = bucket
        self._rights = rights
        self._after = after
        self._gap = gap
        self._until = until
        self._stopped = stopped
        self._heartbeat_seconds = heartbeat_seconds
        self._on_close = on_close
        self._told_gap = 0
        self.is_live = until is None
        """See `reply_writer.LiveStream`."""

    @property
    def length(self) -> None:
        """Nobody knows."""
        return

    async def views(self) -> AsyncIterator[memoryview]:
        """Lines, many to a view."""
        while not self._stopped.is_set() or self._until is not None:
            page = await self._history.read(self._bucket, after=self._after, limit=PAGE_EVENTS)
            if not await self._rights.stand():
                return
            lines, self._gap = bytearray(self._gap), b""
            if self._after + 1 < page.first_kept and page.first_kept > self._told_gap:
                self._told_gap = page.first_kept
                lines += _gap_line(self._after + 1, page.first_kept - 1)
            for event in await self._rights.readable(page.events):
                lines += _encode(line_of(event)) + b"\n"
                if len(lines) >= _VIEW_BYTES:
                    yield memoryview(bytes(lines))
                    lines.clear()
            if lines:
                yield memoryview(bytes(lines))
            self._after = page.last
            if self._until is not None and (not page.more or self._after >= self._until):
                return
            if not page.more and not await self._wait():
                yield memoryview(b"\n")

    async def _wait(self) -> bool:
        """Until there may be more, or the server stops; False: neither, and it is time for a sign of life."""
        waiting = asyncio.create_task(self._history.wait(self._after, timeout_seconds=self._heartbeat_seconds))
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            return stopping.done() or waiting.result()
        finally:
            waiting.cancel()
            stopping.cancel()

    async def aclose(self) -> None:
        """See `BodyStream.aclose`."""
        self._on_close()


class ReaderRights:
    """What one reader may see: an owner all, others the namespaces that they are granted, as of each page."""

    def __init__(self, access: ChunkAccess, user: UserRow, users: UserDirectory) -> None:
        self._access = access
        self._user = user
        self._users = users
        self._granted: set[str] = set()

    async def stand(self) -> bool:
        """Whether the reader is a user still, by the request's key, and the bucket the same (`ChunkAccess.stands`): then what
        was read of it before is its own."""
        user = await self._users.with_access_key(self._user.access_key)
        return user is not None and user.id == self._user.id and await self._access.stands()

    async def readable(self, events: Iterable[EventRow]) -> list[EventRow]:
        """The events that the reader may see."""
        events = list(events)
        if self._access.is_owner:
            return events
        for name in {event.namespace for event in events}:
            namespace = await self._access.namespace(name)
            # The last events of a namespace may be read when it is gone: who was granted it still sees those.
            if namespace is not None and self._user.id in namespace.access:
                self._granted.add(name)
            elif namespace is not None:
                self._granted.discard(name)
        return [event for event in events if event.namespace in self._granted]


def line_of(event: EventRow) -> dict[str, object]:
    """An event as its reader sees it (`kv-api` §7): ids are what match takes, so foreign keys stand without their `NAME/`."""
    namespace = event.namespace or DEFAULT_NAMESPACE
    line: dict[str, object] = {
        "seq": event.sequence,
        "time_ms": event.time_ms,
        "type": event.type.value,
        "namespace": namespace,
    }
    if event.type is EventType.CLEARED:
        if not event.namespace:
            line["namespace"] = None
        return line
    line["ids"] = [name_in(namespace, key) for key in event.keys]
    if event.type is EventType.STORED:
        line["parent"] = parent_in(namespace, event.parent)
    line["tokens"] = event.tokens
    if event.durability:
        line["tier"] = _TIERS[Durability(event.durability)]
    if event.reason:
        line["reason"] = event.reason
    return line


def name_in(namespace: str, key: str) -> str:
    """A chunk's name within its namespace. Bare keys hold no such front: a chunk id has no slash."""
    return key if namespace == DEFAULT_NAMESPACE else key.removeprefix(f"{namespace}/")


def parent_in(namespace: str, parent: str | None) -> str | None:
    """A parent as the PUT's header writes it: `root` for a first chunk, None where there is none."""
    return "root" if parent == "" else None if parent is None else name_in(namespace, parent)


def _gap_line(first: int, last: int) -> bytes:
    return _encode({"type": "gap", "from": first, "to": last}) + b"\n"


def _nothing() -> None:
    """A stream that ends by itself takes nobody's place."""
