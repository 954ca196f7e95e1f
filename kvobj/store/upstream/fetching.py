"""Chunks from an upstream into this store: with their place and their bytes, checked, ancestors first, one flight each.

A chunk is stored here as a writer would store it, so that all that holds for chunks holds for it: its parent is live, its layout
and quota hold, its bytes have the digest that the upstream told. Whatever fails is as if there were no upstream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BlobRef, BucketRow, Durability, ObjectRow
from kvobj.clock import Clock
from kvobj.codec.checksums import blake3_digest
from kvobj.errors import CapacityError, ConflictError, DigestMismatchError, InvalidRequestError, KvobjError
from kvobj.ids import RandomBytes
from kvobj.store.batch import ChunkBatch
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace, check_size, default_namespace, place_of
from kvobj.store.requests import PutRequest
from kvobj.store.upstream.agreement import Agreement
from kvobj.store.upstream.client import ChunkHead, UpstreamClient
from kvobj.store.upstream.instruments import UpstreamInstruments
from kvobj.tiers.remote.faults import RemoteFault
from kvobj.tiers.remote.requests import Exchange

AT_ONCE: Final = 8
"""Chunks of one asker that are on their way at once."""
ANCESTORS_MAX: Final = 1024
"""A chunk with more of them to fetch is handed on without being stored."""
PASSED_BYTES_MAX: Final = 256 * 2**20
"""What is handed on lies outside the arena: no more of it at once than this."""
_DIGESTED_INLINE_BYTES: Final = 64 * 1024


class Outcome(Enum):
    """What became of a chunk that was asked for. `LOOSE`: it is there, and cannot be stored here."""

    STORED = "hit"
    MISSING = "miss"
    LOOSE = "loose"
    FAILED = "failed"
    DISAGREES = "disagrees"


class MakeBatch(Protocol):
    """`ChunkStore.batch`."""

    def __call__(self, size_bytes: int, *, check_shown: Callable[[ObjectRow], Awaitable[None]]) -> ChunkBatch:
        """Room for chunks of so many bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Passed:
    """A chunk that is handed on without being stored: its row is in no catalog. To be released once, when its bytes are not needed
    any more."""

    row: ObjectRow
    data: memoryview
    release: Callable[[], None]


class _Aside(Exception):  # noqa: N818 - a turn that an attempt takes, no error
    """What has to be found out first, outside of the exchange: that holds a connection, which finding out needs too."""


class _AskNamespace(_Aside):
    def __init__(self, place: ChunkPlace) -> None:
        super().__init__()
        self.place = place


class _AskDigest(_Aside):
    pass


class _ParentAway(_Aside):
    def __init__(self, parent: str) -> None:
        super().__init__()
        self.parent = parent


class _Ended(_Aside):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class _Turn:
    """Room for a chunk's bytes is taken after `before`, and then `entered` is set: in the order of a chain, since a child's bytes
    wait for its parent's commit."""

    until: float
    before: asyncio.Event | None
    entered: asyncio.Event


class Fetcher:
    """Of one bucket. Event loop only; `aclose` ends what is on its way."""

    def __init__(
        self,
        client: UpstreamClient,
        agreement: Agreement,
        *,
        catalog: Catalog,
        batch: MakeBatch,
        instruments: UpstreamInstruments,
        clock: Clock,
        random_bytes: RandomBytes,
        log: logging.Logger,
    ) -> None:
        self._client = client
        self._agreement = agreement
        self._catalog = catalog
        self._batch = batch
        self._instruments = instruments
        self._clock = clock
        self._random_bytes = random_bytes
        self._log = log
        # An answer may wait for one who came by another way: a flight is for those that came by the same stores.
        self._flights: dict[tuple[str, tuple[str, ...]], asyncio.Task[Outcome]] = {}
        self._passed_bytes = 0

    async def aclose(self) -> None:
        """End what is on its way."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        if flights:
            await asyncio.wait(flights)

    async def fetch(self, bucket: BucketRow, key: str, *, until: float) -> Outcome:
        """Have a chunk here, with its ancestors. Who asks while it is on its way waits for the same flight, which goes on when the
        first of them leaves."""
        return await asyncio.shield(self._flight(bucket, key, until=until))

    async def fetch_all(self, bucket: BucketRow, keys: Sequence[str], *, until: float, is_run: bool) -> int:
        """Have chunks here, parents before children; how many of them are. `is_run`: none after the first that is not."""
        running: deque[asyncio.Task[Outcome]] = deque()
        stored, waiting, before = 0, iter(keys), None
        is_over = False
        while True:
            while not is_over and len(running) < AT_ONCE and (key := next(waiting, None)) is not None:
                entered = asyncio.Event()
                running.append(self._flight(bucket, key, until=until, before=before, entered=entered))
                before = entered
            if not running:
                return stored
            outcome = await asyncio.shield(running.popleft())
            if outcome is Outcome.STORED:
                stored += not is_over
            elif is_run or self._client.is_down:
                is_over = True

    async def passed(self, bucket: BucketRow, key: str, *, until: float) -> Passed | None:
        """A chunk's bytes without storing them; None where it is not there, there is no room, or anything fails."""
        held = 0

        def release() -> None:
            nonlocal held
            self._passed_bytes -= held
            held = 0

        async def take(head: ChunkHead, exchange: Exchange) -> Passed:
            place = await self._place(bucket, key, head)
            nonlocal held
            release()  # what an earlier attempt held
            if head.digest is None or self._passed_bytes + head.size_bytes > PASSED_BYTES_MAX:
                raise _Ended(Outcome.FAILED)
            held = head.size_bytes
            self._passed_bytes += held
            data = memoryview(bytearray(head.size_bytes))
            if head.size_bytes:
                await exchange.fill(data, _ignore)
            is_small = len(data) <= _DIGESTED_INLINE_BYTES
            digest = blake3_digest(data) if is_small else await asyncio.to_thread(blake3_digest, data)
            if digest != head.digest:
                raise DigestMismatchError("the upstream's bytes do not have the digest that it told", key=key)
            return Passed(self._row(bucket, key, head, place), data.toreadonly(), release)

        found: Passed | None = None
        try:
            async with asyncio.timeout_at(until):
                found = await self._client.read(key, take, until=until)
        except (RemoteFault, KvobjError, TimeoutError, _Aside):
            return None
        finally:
            if found is None:
                release()
        if found is not None:
            self._instruments.chunk("passed")
        return found

    # -- flights -------------------------------------------------------------------------------------------------
    def _flight(
        self,
        bucket: BucketRow,
        key: str,
        *,
        until: float,
        before: asyncio.Event | None = None,
        entered: asyncio.Event | None = None,
    ) -> asyncio.Task[Outcome]:
        """The flight of a chunk; the rest as in `_Turn`."""
        entered = asyncio.Event() if entered is None else entered
        name = (key, self._client.via.came_by)
        flight = self._flights.get(name)
        if flight is not None:
            entered.set()
            return flight
        flight = asyncio.create_task(self._fly(bucket, key, _Turn(until, before, entered)), name="fetch-chunk")
        self._flights[name] = flight
        flight.add_done_callback(lambda _: self._flights.pop(name, None))
        return flight

    async def _fly(self, bucket: BucketRow, key: str, turn: _Turn) -> Outcome:
        try:
            async with asyncio.timeout_at(turn.until):
                outcome = await self._outcome(bucket, key, turn)
        except (TimeoutError, RemoteFault):
            outcome = Outcome.FAILED
        except DigestMismatchError as error:
            self._log.error("upstream of %s: a chunk came with wrong bytes: %s", bucket.name, error)
            outcome = Outcome.FAILED
        except (InvalidRequestError, ConflictError) as error:
            self._log.warning("upstream of %s: a chunk that does not fit here: %s", bucket.name, error)
            outcome = Outcome.DISAGREES
        except CapacityError:
            outcome = Outcome.LOOSE
        except KvobjError as error:
            self._log.warning("upstream of %s: a chunk could not be stored: %s", bucket.name, error)
            outcome = Outcome.LOOSE
        finally:
            turn.entered.set()
        if outcome is not Outcome.LOOSE:
            self._instruments.chunk(outcome.value)
        return outcome

    async def _outcome(self, bucket: BucketRow, key: str, turn: _Turn) -> Outcome:
        until = turn.until
        digest: bytes | None = None
        has_ancestors = False
        while True:
            try:
                return await self._take(bucket, key, turn, digest)
            except _Ended as ended:
                return ended.outcome
            except _AskNamespace as asked:
                if await self._agreement.ask(asked.place.namespace, until=until):
                    return Outcome.DISAGREES
            except _AskDigest:
                head = await self._client.head(key, until=until)
                if head is None or head.digest is None:
                    return Outcome.MISSING if head is None else Outcome.LOOSE
                digest = head.digest
            except _ParentAway as away:
                if has_ancestors or not await self._fetch_ancestors(bucket, away.parent, until=until):
                    return Outcome.LOOSE
                has_ancestors = True

    async def _take(self, bucket: BucketRow, key: str, turn: _Turn, digest: bytes | None) -> Outcome:
        async with AsyncExitStack() as stack:

            async def take(head: ChunkHead, exchange: Exchange) -> tuple[ChunkBatch, ChunkPlace]:
                await stack.aclose()  # what an earlier attempt had
                place = await self._place(bucket, key, head)
                if head.digest is None and digest is None:
                    raise _AskDigest
                if place.parent and not await self._is_coming(bucket, place.parent):
                    raise _ParentAway(place.parent)
                if turn.before is not None:
                    await turn.before.wait()
                batch = await stack.enter_async_context(self._batch(head.size_bytes, check_shown=_is_shown))
                turn.entered.set()
                request = PutRequest(
                    bucket=bucket,
                    key=key,
                    size_bytes=head.size_bytes,
                    owner=bucket.owner,
                    durability=Durability.LOCAL if bucket.durability is Durability.SHARED else None,
                    headers=head.headers,
                    metadata=head.metadata,
                    place=place,
                )
                transfer = await batch.reserve(request)
                if transfer is None:  # somebody has written it meanwhile
                    raise _Ended(Outcome.STORED)
                await batch.fill(transfer, _Body(exchange), digest=head.digest or digest)
                return batch, place

            found = await self._client.read(key, take, until=turn.until)
            if found is None:
                return Outcome.MISSING
            batch, place = found
            flight = self._flights.get((place.parent, self._client.via.came_by)) if place.parent else None
            if flight is not None:
                await asyncio.shield(flight)
            (item,) = await batch.commit(quota=place.namespace.quota, parent_tokens=place.parent_tokens)
            if item.error is not None:
                raise item.error
            return Outcome.STORED

    async def _fetch_ancestors(self, bucket: BucketRow, key: str, *, until: float) -> bool:
        """Have a chunk and all before it here, in half of the time: the other is for the chunk itself. What the upstream has, it
        has with all ancestors."""
        now = asyncio.get_running_loop().time()
        until = now + (until - now) / 2
        try:
            async with asyncio.timeout_at(until):
                return await self._have_ancestors(bucket, key, until=until)
        except TimeoutError:
            return False

    async def _have_ancestors(self, bucket: BucketRow, key: str, *, until: float) -> bool:
        missing: list[str] = []
        while not await self._is_coming(bucket, key):
            head = None if len(missing) >= ANCESTORS_MAX else await self._client.head(key, until=until)
            if head is None or key in missing:
                return False
            missing.append(key)
            parent = (await self._place(bucket, key, head)).parent
            if not parent:
                break
            key = parent
        missing.reverse()
        return await self.fetch_all(bucket, missing, until=until, is_run=True) == len(missing)

    async def _is_coming(self, bucket: BucketRow, key: str) -> bool:
        """Whether a chunk is live here, or on its way."""
        if (key, self._client.via.came_by) in self._flights:
            return True
        (row,) = await self._catalog.lookup(bucket.name, [key])
        return row is not None

    async def _place(self, bucket: BucketRow, key: str, head: ChunkHead) -> ChunkPlace:
        """Where the chunk belongs here. Errors of `place_of` and `check_size`: it fits nowhere."""
        if head.namespace in ("", DEFAULT_NAMESPACE):
            namespace = default_namespace(bucket.name)
        else:
            row = await self._catalog.namespaces.namespace(bucket.name, head.namespace)
            if row is None:
                raise _Ended(Outcome.DISAGREES)  # it is not imported
            namespace = row
        place = place_of(namespace, key, parent=head.parent, tokens=head.tokens or None)
        check_size(place, head.size_bytes)
        known = self._agreement.known(namespace)
        if known is None:
            raise _AskNamespace(place)
        if known:
            raise _Ended(Outcome.DISAGREES)
        return place

    def _row(self, bucket: BucketRow, key: str, head: ChunkHead, place: ChunkPlace) -> ObjectRow:
        assert head.digest is not None
        blob = BlobRef(
            blob_id=self._random_bytes(16),
            plain_bytes=head.size_bytes,
            frame_bytes=head.size_bytes,
            digest=head.digest,
            codec="raw",
        )
        return ObjectRow(
            bucket=bucket.name,
            key=key,
            blobs=(blob,),
            size_bytes=head.size_bytes,
            etag=f"kv{head.digest.hex()[:24]}-1",
            modified_ms=self._clock.now_ms(),
            owner=bucket.owner,
            durability=Durability.MEMORY,
            headers=dict(head.headers),
            metadata=dict(head.metadata),
            digest=head.digest,
            parent=place.parent,
            namespace=place.namespace.name,
            tokens=place.tokens,
        )


class _Body:
    """Implements `batch.ByteSource`: an exchange's body."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def receive_into(self, buffer: memoryview, on_bytes: Callable[[int], None]) -> None:
        """See `ByteSource`."""
        await self._exchange.fill(buffer, on_bytes)


async def _is_shown(_: ObjectRow) -> None:
    """A live row may be known of: nobody is told here."""


def _ignore(_: int) -> None:
    """Bytes have arrived."""
