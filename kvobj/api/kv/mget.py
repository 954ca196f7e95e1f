"""POST ?mget: many chunks in one streamed reply, whole or by layers, none of them reaped while it is on its way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Annotated, Final, Literal, cast

import msgspec

from kvobj.api.accepting import parse_accepted
from kvobj.api.exchange import Exchange
from kvobj.api.kv.calls import Call, begin
from kvobj.api.kv.chunk_lists import chunk_list
from kvobj.api.kv.chunk_stream import CONTENT_TYPE, framed
from kvobj.api.kv.matching import session_of
from kvobj.api.kv_store import ChunkStore
from kvobj.api.message import Reply, whole_of
from kvobj.api.object_store import ObjectStore, Reader
from kvobj.api.operations import GetChunks
from kvobj.catalog.chunk_list import ChunkList
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import ObjectRow
from kvobj.errors import BusyError, InvalidRequestError, NoSuchNamespaceError
from kvobj.store.given_chunks import PLAIN
from kvobj.store.places import DEFAULT_NAMESPACE, layer_count, layer_span
from kvobj.store.representation import Accepted, lossy_text, plain_only, stored_codec, takes_raw
from kvobj.tiers.coded_frames import spoken_name

LOOK_AHEAD: Final = 2
"""Chunks that are opened while others are sent: each pins a frame, and a cold one fills meanwhile."""
BURST_BYTES: Final = 8 * 1024 * 1024
"""Chunks that lie in memory are sent together until they are so many bytes: handing 1 MiB over by itself takes as long as sending
it."""
_GATHERED_VIEW_BYTES: Final = 16 * 1024
_GATHERED_BYTES: Final = 64 * 1024
_NOTHING: Final = memoryview(b"")
_OK: Final = 200
_MISS: Final = 404
_NO_ROOM: Final = 503
"""An item of these two has no bytes: to who reads the stream it is a miss either way, and the other items come."""
SHORT_SECONDS: Final = 0.1
"""Once there was no room for one item the next are waited for no longer than this, until one finds some: else who reads a long list
would give up before what lies in memory further on is sent."""
_ITEMS_A_TURN: Final = 64
"""Items after which others run, where neither a tier nor the client makes the stream wait."""

_Layer = Annotated[int, msgspec.Meta(ge=0, lt=2**20)]


class _Get(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    namespace: str | None = None
    pin: bool = False
    layers: tuple[_Layer, _Layer] | None = None
    order: Literal["chunk", "layer"] = "chunk"
    accept: tuple[str, ...] = ("raw",)


class GetJson(_Get, frozen=True, forbid_unknown_fields=True):
    """The request in JSON."""

    ids: list[str] = []
    session: str | None = None


class GetMsgpack(_Get, frozen=True, forbid_unknown_fields=True):
    """The request in msgpack: ids are one byte string, keys a list of strings."""

    ids: bytes | list[str] = b""
    session: bytes | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """One item of the reply: the bytes `[start, stop)` of a row, or a miss (None)."""

    index: int
    layer: int | None
    row: ObjectRow | None
    start: int = 0
    stop: int = 0


_Opened = tuple[Reader | None, Span]
"""What a span was opened as: of another representation than plain bytes the span is another too."""


@dataclass(frozen=True, slots=True)
class _NoRoom:
    """What a span was not opened for; `closed` counts the readers that its stream had closed by then."""

    closed: int


_Opening = asyncio.Task[_Opened | _NoRoom] | Reader | None
_Pieces = list[tuple[bytes, memoryview]]


class BatchReads:
    """Handler of ?mget."""

    def __init__(self, store: ObjectStore, chunks: ChunkStore, *, bursts: BurstBudget) -> None:
        self._store = store
        self._chunks = chunks
        self._bursts = bursts

    async def get(self, exchange: Exchange, operation: GetChunks) -> Reply:
        """Stream the chunks in the order of the list, or layer by layer; a miss is an item with status 404, and one for which no
        room came free in time an item with 503."""
        call = await begin(exchange, operation, self._store, self._chunks)
        request: GetJson | GetMsgpack = await call.read(GetJson, GetMsgpack)
        session = session_of(request.session) if request.pin else None
        accepts = self._accepts(request)
        if request.layers is not None and request.layers[0] > request.layers[1]:
            raise InvalidRequestError("layers are [A, B], both in the range, A not above B", field="layers")
        namespace = None if request.namespace is None else (await call.namespace(request.namespace)).row
        chunks = chunk_list(namespace, request.ids)
        headers = [("content-type", CONTENT_TYPE)]
        if session is not None:
            headers += await self._pin(call, namespace, chunks, session, PLAIN if accepts is None else accepts)
        rows = await self._chunks.find(call.bucket, chunks, caller=call.caller)
        if namespace is not None:
            # A key may be of another namespace than the one that was named: it is not in that one.
            rows = [row if row is not None and _is_of(row, namespace) else None for row in rows]
        release = self._chunks.use([row for row in rows if row is not None])
        try:
            spans = await self._spans(call, request, rows)
        except BaseException:
            release()
            raise
        return exchange.reply(
            200, headers, ChunkStream(spans, self._store, release, bursts=self._bursts, accepts=accepts)
        )

    @staticmethod
    def _accepts(request: GetJson | GetMsgpack) -> tuple[Accepted, ...] | None:
        try:
            accepts = parse_accepted(request.accept)
        except ValueError as error:
            raise InvalidRequestError(str(error), field="accept") from error
        in_pieces = request.layers is not None or request.order == "layer"
        if accepts is None or not in_pieces:
            return accepts
        if not takes_raw(accepts):
            raise InvalidRequestError("layers are sent raw", field="accept")
        return plain_only(accepts)

    async def _pin(
        self,
        call: Call,
        namespace: NamespaceRow | None,
        chunks: ChunkList,
        session: bytes,
        accepts: tuple[Accepted, ...],
    ) -> list[tuple[str, str]]:
        """Pin the run at the head of the list that is given, as ?match does; what the reply's headers tell of it."""
        if namespace is None:
            raise InvalidRequestError("a pin needs a namespace", field="namespace")
        opened = await call.namespace(namespace.name)
        found = await self._chunks.match(
            call.bucket, opened, chunks, caller=call.caller, session=session, accepts=accepts
        )
        if found.pin is None:
            return []
        return [
            ("x-kvobj-pin", found.pin.hex()),
            ("x-kvobj-grant", str(found.grant)),
            ("x-kvobj-deadline-ms", str(found.deadline_ms)),
            ("x-kvobj-matched", str(found.matched)),
        ]

    async def _spans(
        self, call: Call, request: GetJson | GetMsgpack, rows: Sequence[ObjectRow | None]
    ) -> Iterator[Span]:
        """The items in the order in which they are sent. Whether every layout has the layers is known before the first."""
        if request.layers is None and request.order == "chunk":
            return _whole(rows)
        layouts: dict[str, NamespaceRow] = {}
        for row in rows:
            if row is not None and row.namespace not in layouts:
                try:
                    layouts[row.namespace] = (await call.namespace(row.namespace or DEFAULT_NAMESPACE)).row
                except NoSuchNamespaceError as error:
                    raise InvalidRequestError("the chunk's layout does not put layers first") from error
        if request.layers is not None:
            first, last = request.layers
        else:
            # Of what is there: a miss has no layers, and is told in each pass. What has none is refused below.
            counts = sorted({layer_count(layout) for layout in layouts.values()} - {0}) or [1]
            if len(counts) > 1:
                told = f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
                raise InvalidRequestError(
                    f"chunks of {told} layers have no order by layers in common: give layers, which all have, or ask for the "
                    "chunks of each number of layers in a call of their own",
                    field="order",
                )
            first, last = 0, counts[0] - 1
        for row in rows:
            if row is not None:
                layer_span(layouts[row.namespace], row, first, last)
        if request.order == "chunk":
            return _layered(rows, layouts, [(None, first, last)])
        return _layered(rows, layouts, [(layer, layer, layer) for layer in range(first, last + 1)])


class BurstBudget:
    """How much all streams together may keep from being evicted for the sake of bursts: clients that take them slowly keep it for
    as long as they like. Beyond it a burst is one chunk."""

    __slots__ = ("_bytes_max", "held_bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.held_bytes = 0

    @property
    def burst_bytes(self) -> int:
        """From how many bytes on a burst is sent."""
        return BURST_BYTES if self.held_bytes < self._bytes_max else 1


class ChunkStream:
    """Implements `message.BurstStream`: opens a few items ahead of those that are sent, and ends with a count."""

    length = None

    def __init__(
        self,
        spans: Iterator[Span],
        store: ObjectStore,
        release: Callable[[], None],
        *,
        bursts: BurstBudget,
        accepts: tuple[Accepted, ...] | None = None,
    ) -> None:
        self._spans = spans
        self._store = store
        self._release = release
        self._bursts = bursts
        self._accepts = accepts
        self._ahead: deque[tuple[Span, _Opening]] = deque()
        self._current: Reader | None = None
        self._sent: list[Reader] = []
        """Of what is in the burst that is made, or was taken last; `_sent_bytes` of it count in the budget."""
        self._sent_bytes = 0
        self._items = 0
        self._closed = 0
        """Readers that were closed: each gives back room, or may."""
        self._is_short = False
        """Whether the last item that was waited for found no room."""

    async def views(self) -> AsyncIterator[memoryview]:
        """See `BodyStream.views`."""
        async with aclosing(self.bursts()) as bursts:
            async for burst in bursts:
                for lead, view in burst:
                    if lead:
                        yield memoryview(lead)
                    if len(view):
                        yield view

    async def bursts(self) -> AsyncGenerator[_Pieces, None]:
        """See `BurstStream.bursts`. Headers, and payloads that are small, are gathered, and lead the next one that is not."""
        burst = _Burst()
        while (following := await self._following()) is not None:
            span, opening = following
            if not (burst.is_empty or _is_open(opening)):
                yield burst.take()  # nobody knows how long the next one takes, which may need the room of these
                await self._close_sent()
            reader, span, status = await self._opened(span, opening)
            self._ahead.popleft()
            self._current = reader
            whole = None if reader is None else whole_of(reader)
            if reader is not None and whole is None and not burst.is_empty:
                yield burst.take()  # its bytes are still to come, and nobody knows when
                await self._close_sent()
            burst.gathered += await self._header(span, status)
            if reader is not None:
                if whole is not None:
                    if burst.add(whole):
                        self._keep(reader, len(whole))
                    else:
                        await self._close(reader)
                else:
                    async with aclosing(cast("AsyncGenerator[memoryview, None]", reader.views())) as views:
                        async for view in views:
                            if burst.add(view):
                                yield burst.take()
                                await self._close_sent()
                    await self._close(reader)
                self._current = None
            if burst.is_full(self._bursts.burst_bytes):
                yield burst.take()
                await self._close_sent()
        burst.gathered += framed({"end": True, "items": self._items})
        yield burst.take()

    async def _following(self) -> tuple[Span, _Opening] | None:
        """The item that is sent next, which stays among those ahead until it was opened."""
        while len(self._ahead) <= LOOK_AHEAD and (span := next(self._spans, None)) is not None:
            self._ahead.append((span, self._open(span)))
        if not self._ahead:
            return None
        self._items += 1
        if self._items % _ITEMS_A_TURN == 0:
            await asyncio.sleep(0)
        return self._ahead[0]

    def _keep(self, reader: Reader, size_bytes: int) -> None:
        """Until the burst has left."""
        self._sent.append(reader)
        self._sent_bytes += size_bytes
        self._bursts.held_bytes += size_bytes

    async def _close(self, reader: Reader) -> None:
        await reader.aclose()
        self._closed += 1

    async def _close_sent(self) -> None:
        self._closed += len(self._sent)
        self._bursts.held_bytes -= self._sent_bytes
        self._sent_bytes = 0
        async with AsyncExitStack() as closing:
            while self._sent:
                closing.push_async_callback(self._sent.pop().aclose)

    async def _header(self, span: Span, status: int) -> bytes:
        header: dict[str, object] = {"i": span.index, "layer": span.layer, "codec": "raw"}
        row = span.row
        if row is None or status != _OK:
            return framed(header | {"size_bytes": 0, "digest": None, "status": status})
        size_bytes = span.stop - span.start
        if self._accepts is not None:
            header |= _representation(row)
        elif row.digest is None:
            row = await self._store.settled(row, wait=False)
        digest = row.digest if size_bytes == row.size_bytes and "lossy" not in header else None
        return framed(header | {"size_bytes": size_bytes, "digest": digest, "status": status})

    def _open(self, span: Span) -> _Opening:
        """The reader where its bytes lie in memory, or the task that opens it; None where there is nothing to open."""
        if span.row is None or span.start == span.stop:
            return None
        hot = self._store.open_hot(span.row, span.start, span.stop) if self._accepts is None else None
        return hot or asyncio.create_task(self._open_ahead(span, span.row))

    async def _open_ahead(self, span: Span, row: ObjectRow) -> _Opened | _NoRoom:
        try:
            return await self._open_row(span, row)
        except BusyError:
            return _NoRoom(self._closed)

    async def _open_row(self, span: Span, row: ObjectRow) -> _Opened:
        if self._accepts is not None:
            found = await self._store.represent(row, self._accepts)
            if found is None:
                return None, span
            stop = found.size_bytes if span.stop == row.size_bytes else span.stop
            row, span = found, Span(span.index, span.layer, found, span.start, stop)
        return await self._store.open(row, span.start, span.stop), span

    async def _opened(self, span: Span, opening: _Opening) -> tuple[Reader | None, Span, int]:
        """With the item's status."""
        reader: Reader | None
        if isinstance(opening, asyncio.Task):
            opened = await self._in_turn(span, opening)
            self._is_short = isinstance(opened, _NoRoom)
            if isinstance(opened, _NoRoom):
                return None, span, _NO_ROOM
            reader, span = opened
        else:
            reader = opening
        is_there = span.row is not None and (reader is not None or span.start == span.stop)
        return reader, span, _OK if is_there else _MISS

    async def _in_turn(self, span: Span, opening: asyncio.Task[_Opened | _NoRoom]) -> _Opened | _NoRoom:
        if self._is_short:
            await asyncio.wait([opening], timeout=SHORT_SECONDS)
            if not opening.done():
                opening.cancel()
                await _close_unwanted(opening)
                return _NoRoom(self._closed)
        opened = await opening
        if not isinstance(opened, _NoRoom) or opened.closed == self._closed or self._is_short:
            return opened
        # There was no room to read ahead into. What this stream held then is free by now.
        assert span.row is not None
        return await self._open_ahead(span, span.row)

    async def aclose(self) -> None:
        """See `BodyStream.aclose`."""
        async with AsyncExitStack() as closing:  # each whatever becomes of the others; the last first
            closing.callback(self._release)
            while self._ahead:
                closing.push_async_callback(_close_unwanted, self._ahead.pop()[1])
            current, self._current = self._current, None
            if current is not None:
                closing.push_async_callback(current.aclose)
            closing.push_async_callback(self._close_sent)


class _Burst:
    """What is sent next. Headers and small payloads are gathered, by copy, in front of the next view, or behind the last."""

    __slots__ = ("_pieces", "_size_bytes", "gathered")

    def __init__(self) -> None:
        self.gathered = bytearray()
        self._pieces: _Pieces = []
        self._size_bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._pieces and not self.gathered

    def is_full(self, burst_bytes: int) -> bool:
        return (
            self._size_bytes >= burst_bytes
            or len(self._pieces) >= _ITEMS_A_TURN
            or len(self.gathered) >= _GATHERED_BYTES // 2
        )

    def add(self, view: memoryview) -> bool:
        """Whether the view itself is sent, and has to stay: of a small one its bytes are."""
        if len(view) <= _GATHERED_VIEW_BYTES and len(self.gathered) + len(view) <= _GATHERED_BYTES:
            self.gathered += view
            return False
        self._pieces.append((bytes(self.gathered), view))
        self._size_bytes += len(view)
        self.gathered.clear()
        return True

    def take(self) -> _Pieces:
        """All of it; from here on it is empty."""
        pieces = self._pieces
        if self.gathered:
            pieces.append((bytes(self.gathered), _NOTHING))
            self.gathered.clear()
        self._pieces, self._size_bytes = [], 0
        return pieces


def _is_open(opening: _Opening) -> bool:
    """Whether nothing is to be waited for."""
    if not isinstance(opening, asyncio.Task):
        return True
    is_done = opening.done() and not opening.cancelled() and opening.exception() is None
    return is_done and not isinstance(opening.result(), _NoRoom)


async def _close_unwanted(opening: _Opening) -> None:
    """Close what was opened ahead, or will be in a moment; there is none where that failed, or whoever waited was cancelled."""
    reader: Reader | None
    if isinstance(opening, asyncio.Task):
        await asyncio.wait([opening])
        opened = None if opening.cancelled() or opening.exception() is not None else opening.result()
        reader = opened[0] if isinstance(opened, tuple) else None
    else:
        reader = opening
    if reader is not None:
        await reader.aclose()


def _representation(row: ObjectRow) -> dict[str, object]:
    """What an item's header says of its bytes, to a reader that said which codecs it takes."""
    stored = stored_codec(row.blobs[0]) if row.blobs else None
    told: dict[str, object] = {} if stored is None else {"codec": spoken_name(stored)}
    lossy = lossy_text(row)
    if lossy is not None and row.lossy is not None:
        told["lossy"] = lossy
        if row.lossy.profile:
            told["profile"] = row.lossy.profile
    return told


def _whole(rows: Sequence[ObjectRow | None]) -> Iterator[Span]:
    for index, row in enumerate(rows):
        yield Span(index, None, row, 0, 0 if row is None else row.size_bytes)


def _layered(
    rows: Sequence[ObjectRow | None],
    layouts: dict[str, NamespaceRow],
    passes: Sequence[tuple[int | None, int, int]],
) -> Iterator[Span]:
    for told, first, last in passes:
        for index, row in enumerate(rows):
            if row is None:
                yield Span(index, told, None)
            else:
                yield Span(index, told, row, *layer_span(layouts[row.namespace], row, first, last))


def _is_of(row: ObjectRow, namespace: NamespaceRow) -> bool:
    return (row.namespace or DEFAULT_NAMESPACE) == namespace.name
