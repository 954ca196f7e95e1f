"""Chunks as the KV API sees them: namespaces, sessions, pins and match, over the catalog, the policy and the tiers.

Coordination only, like `Store`, whose bytes it never touches: what exists and who holds it is the catalog's, in one step each; what
a namespace is and who may use it is the book's. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final, Protocol

from kvobj.catalog.chunk_heads import MatchedChunk
from kvobj.catalog.chunk_list import ChunkList, KeyList, first_of
from kvobj.catalog.chunk_records import ChunkRecords, EncodedChunks, encode_chunks
from kvobj.catalog.lease_protocol import MatchResult, PinsResult, Renewal, TailPin
from kvobj.catalog.lease_rows import SessionRow
from kvobj.catalog.namespace_protocol import NamespaceRow, NamespaceUsage
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketRow, ObjectRow
from kvobj.clock import Clock, boot_ms
from kvobj.errors import (
    BusyError,
    InvalidRequestError,
    NamespaceConflictError,
    NoSuchBucketError,
    NoSuchNamespaceError,
)
from kvobj.store.batch import ChunkBatch, Reached, StartsTogether
from kvobj.store.byte_gate import ByteGate
from kvobj.store.chunk_naming import chunks_of_tokens, count_of_tokens
from kvobj.store.chunk_values import Caller, ChunkDetail, MatchReply, MissExplanation, OpenNamespace
from kvobj.store.explain import Explainer, MissReason
from kvobj.store.given_chunks import PLAIN, GivenChunks
from kvobj.store.ingest import PutTransfer
from kvobj.store.load_estimate import expected_load_ms
from kvobj.store.lossy_namespaces import LossyNamespaces
from kvobj.store.namespaces import NamespaceBook, differs, require_owner
from kvobj.store.places import DEFAULT_NAMESPACE
from kvobj.store.representation import Accepted
from kvobj.store.request_feed import RequestTrace
from kvobj.store.requests import PutRequest
from kvobj.tiers.coded_frames import spoken_name
from kvobj.tiers.in_use import BlobsInUse

# Fewer tokens are named on the event loop: a hop to the pool costs more than it frees.
TOKENS_INLINE_BYTES: Final = 64 * 1024
LOOKUP_KEYS: Final = 1024
"""Looked up in one go; between two of them others run."""
DETAILS_A_TURN: Final = 4096
"""About 3 ms; then others run."""
_NAMESPACES_EXPLAINED: Final = 1000
_MATCH_ATTEMPTS: Final = 16
_REMOVAL_ROUNDS: Final = 8
_REMOVAL_FACTOR: Final = 4
"""The chunks of a namespace that is removed go so much faster than the collector's, beside other work."""


class RemovalPace(Protocol):
    """How fast gc may remove (`gc.pacing.Pace`)."""

    @property
    def batch(self) -> int:
        """How many chunks at once."""
        ...

    async def after(self, chunks: int, *, seconds: float) -> None:
        """Wait after so many chunks that took so many seconds, as long as the rate asks."""
        ...


class ChunkStore:
    """Implements `api.kv_store.ChunkStore`.

    `start` is `Store.start_in_batch`, `together` the store itself, `reached` and `settle` are `Store.reached` and `Store.settled`;
    `gate` bounds the bytes of batches on their way in. `hold` is told of rows that somebody asked for; `tiers_of` names the tiers
    that blobs would be read from, `codecs_of` the codecs of those that lie coded there; `on_request` is told of every matched
    request and must return at once; `on_removed` of rows that were hidden, and `removed` is waited for with the bucket before
    anybody is told that they are gone (`Store.removed`); `is_arriving` answers whether a key of a bucket is being written in
    a namespace; `pace` is how fast a namespace's chunks are removed; `given` tells which chunks a reader would be given, `lossy` is
    told of namespaces that were lossy.
    """

    def __init__(
        self,
        *,
        catalog: Catalog,
        book: NamespaceBook,
        clock: Clock,
        in_use: BlobsInUse,
        executor: Executor,
        gate: ByteGate,
        start: Callable[[PutRequest], Awaitable[PutTransfer]],
        together: StartsTogether,
        reached: Reached,
        settle: Callable[[ObjectRow], Awaitable[ObjectRow]],
        hold: Callable[[ObjectRow], None],
        tiers_of: Callable[[Sequence[bytes]], list[str]],
        codecs_of: Callable[[Sequence[bytes]], Mapping[bytes, str]] = lambda _: {},
        on_request: Callable[[RequestTrace], None],
        on_removed: Callable[[Sequence[ObjectRow]], None],
        removed: Callable[[str], Awaitable[None]],
        is_arriving: Callable[[str, str, str], bool],
        lease_ttl_ms: int,
        pace: RemovalPace,
        given: GivenChunks,
        lossy: LossyNamespaces,
    ) -> None:
        self._catalog = catalog
        self._given = given
        self._lossy = lossy
        self._pace = pace
        self._lease_ttl_ms = lease_ttl_ms
        self._book = book
        self._clock = clock
        self._in_use = in_use
        self._executor = executor
        self._gate = gate
        self._start = start
        self._together = together
        self._reached = reached
        self._settle = settle
        self._hold = hold
        self._tiers_of = tiers_of
        self._codecs_of = codecs_of
        self._on_request = on_request
        self._on_removed = on_removed
        self._removed = removed
        self._explainer = Explainer(
            catalog, chunks_of_tokens=self.chunks_of_tokens, differs=differs, is_arriving=is_arriving
        )

    # -- namespaces ----------------------------------------------------------------------------------------------
    async def declare_namespace(
        self,
        bucket: BucketRow,
        name: str,
        declaration: Mapping[str, object],
        *,
        caller: Caller,
        key: bytes | None = None,
    ) -> tuple[OpenNamespace, bool]:
        """See `api.kv_store.ChunkStore`. Errors as `NamespaceBook.declare`; `AccessDeniedError` for all but owners."""
        require_owner(bucket, caller)
        standing = await self._catalog.namespaces.namespace(bucket.name, name)
        if standing is None:
            await self._check_no_keys_below(bucket, name)
        elif standing.lossy:
            self._lossy.note(bucket.name, name)  # it may not be from now on
        declared = await self._book.declare(bucket, name, declaration, caller=caller, key=key)
        # Where it stood equally declared nothing was written that looked at the bucket, and its key is about to be told.
        if not bucket.is_still(await self._catalog.bucket(bucket.name)):
            raise NoSuchBucketError("the bucket is gone", bucket=bucket.name)
        return declared

    async def _check_no_keys_below(self, bucket: BucketRow, name: str) -> None:
        """Keys `NAME/…` that were stored before NAME is declared are chunks of `default`: nobody could read them in NAME, and none
        could be stored in their place."""
        page = await self._catalog.list_objects(bucket.name, key_prefix=f"{name}/", limit=1)
        if page.rows:
            raise NamespaceConflictError(
                "keys of another namespace begin with this name",
                namespace=name,
                differs=("keys",),
                key=page.rows[0].key,
            )

    async def namespace(self, bucket: BucketRow, name: str, *, caller: Caller) -> OpenNamespace:
        """See `api.kv_store.ChunkStore`."""
        return await self._book.open(bucket, name, caller=caller)

    async def namespaces(
        self, bucket: BucketRow, *, after: str, limit: int, caller: Caller
    ) -> tuple[tuple[OpenNamespace, NamespaceUsage], ...]:
        """See `api.kv_store.ChunkStore`."""
        opened = await self._book.page(bucket, after=after, limit=limit, caller=caller)
        usage = self._catalog.namespaces.usage
        return tuple([(each, await usage(bucket.name, each.row.name)) for each in opened])

    async def namespace_usage(self, bucket: BucketRow, name: str) -> NamespaceUsage:
        """Live chunks of one namespace and their bytes."""
        return await self._catalog.namespaces.usage(bucket.name, name)

    async def remove_namespace(self, bucket: BucketRow, name: str, *, caller: Caller) -> int:
        """See `api.kv_store.ChunkStore`. For owners: `AccessDeniedError`; `InvalidRequestError` for `default`; `BusyError`."""
        require_owner(bucket, caller)
        if name == DEFAULT_NAMESPACE:
            raise InvalidRequestError(f"{DEFAULT_NAMESPACE} cannot be removed", field="namespace")
        meant = (await self._book.open(bucket, name, caller=caller)).row
        removed = await self._recall(meant, made_ms=bucket.created_ms)
        for _ in range(_REMOVAL_ROUNDS):
            try:
                await self._book.remove(bucket, name, caller=caller, namespace_root=meant.root)
                break
            except BusyError:  # chunks were committed meanwhile
                removed += await self._recall(meant, made_ms=bucket.created_ms)
        else:
            raise BusyError("the namespace is being written", bucket=bucket.name, namespace=name)
        self._lossy.forget(bucket.name, name)
        await self._catalog.history.tell_cleared(bucket.name, name, now_ms=self._clock.now_ms())
        await self._removed(bucket.name)
        return removed

    async def _recall(self, meant: NamespaceRow, *, made_ms: int) -> int:
        """Hide the chunks of the namespace. `NoSuchNamespaceError` as soon as another is declared under its name, or none is: who
        removes it beside this one is as far, and what is there is not this one's."""
        bucket, name = meant.bucket, meant.name
        removed, after = 0, ""
        while True:
            started = self._clock.monotonic()
            limit = _REMOVAL_FACTOR * self._pace.batch
            page = await self._catalog.recall(
                bucket,
                namespace=name,
                after=after,
                limit=limit,
                made_ms=made_ms,
                namespace_root=meant.root,
                now_ms=self._clock.now_ms(),
            )
            removed += len(page.recalled)
            self._on_removed(page.recalled)
            if page.next_after is None:
                return removed
            after = page.next_after
            chunks = -(-len(page.recalled) // _REMOVAL_FACTOR)
            await self._pace.after(chunks, seconds=self._clock.monotonic() - started)

    # -- match ---------------------------------------------------------------------------------------------------
    async def chunks_of_tokens(self, namespace: OpenNamespace, tokens: bytes) -> ChunkList:
        """The chunks that a sequence of tokens (little-endian u32) makes. Errors as `chunk_naming.count_of_tokens`."""
        count_of_tokens(namespace.row, tokens)
        if len(tokens) <= TOKENS_INLINE_BYTES:
            return chunks_of_tokens(namespace, tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, chunks_of_tokens, namespace, tokens)

    async def match(
        self,
        bucket: BucketRow,
        namespace: OpenNamespace,
        chunks: ChunkList,
        *,
        caller: Caller,
        tokens: bytes | None = None,
        session: bytes | None = None,
        detail: bool = False,
        name: Callable[[str], str | bytes] = str,
        may_encode: bool = False,
        explain: bool = False,
        partial_last: bool = False,
        hint: int = 0,
        accepts: Sequence[Accepted] = PLAIN,
    ) -> MatchReply:
        """See `api.kv_store.ChunkStore`. Errors as `Leases.match`."""
        result, is_cut = await self._run(
            bucket, namespace, chunks, caller=caller, session=session, rows=detail, accepts=accepts
        )
        is_lossy = self._lossy.may_be(namespace.row)
        details = None
        if detail:
            may_encode = may_encode and not is_lossy
            details = await self._details(bucket, result.rows, name, may_encode=may_encode, is_lossy=is_lossy)
        explanation = None
        if explain and is_cut:
            explanation = MissExplanation(result.matched, MissReason.NOT_ACCEPTED)
        elif explain and result.matched < len(chunks):
            others: Sequence[OpenNamespace] = ()
            if tokens is not None:
                others = await self._book.page(bucket, after="", limit=_NAMESPACES_EXPLAINED, caller=caller)
            explanation = await self._explainer.explain(
                bucket, namespace, chunks, result.matched, tokens=tokens, others=others
            )
        self._on_request(RequestTrace(bucket.name, chunks, partial_last, hint))
        return MatchReply(
            matched=result.matched,
            tokens=result.tokens,
            size_bytes=result.size_bytes,
            expected_load_ms=expected_load_ms(self._bytes_by_tier(result, details)),
            pin=result.pin,
            grant=result.grant,
            deadline_ms=result.deadline_ms,
            chunks=details,
            explain=explanation,
        )

    async def _run(
        self,
        bucket: BucketRow,
        namespace: OpenNamespace,
        chunks: ChunkList,
        *,
        caller: Caller,
        session: bytes | None,
        rows: bool,
        accepts: Sequence[Accepted],
    ) -> tuple[MatchResult, bool]:
        """The longest run that the caller is given, pinned; and whether it ends at a chunk that is live. `BusyError` where what it
        is given changed time and again meanwhile."""
        is_sure = self._given.is_sure(namespace.row, accepts)
        asked, count = chunks, len(chunks)
        for _ in range(_MATCH_ATTEMPTS):
            result = await self._catalog.leases.match(
                bucket.name,
                asked,
                namespace=namespace.row.name,
                rows=rows or not is_sure,
                pin_for=session,
                user=caller.user_id,
                now_boot_ms=boot_ms(self._clock),
            )
            given = result.matched if is_sure else await self._given.run(bucket.name, result.rows, accepts)
            if given == result.matched:
                return result, result.matched == count < len(chunks)
            if session is not None and result.pin is not None:  # of chunks that are none of the run: nobody hears of it
                await self.pin_tails(bucket, session, KeyList([]), release=[result.pin], caller=caller)
            asked, count = first_of(chunks, given), given
        raise BusyError("the chain changed too often while it was matched", bucket=bucket.name)

    async def _details(
        self,
        bucket: BucketRow,
        found: Sequence[MatchedChunk],
        name: Callable[[str], str | bytes],
        *,
        may_encode: bool,
        is_lossy: bool,
    ) -> tuple[ChunkDetail, ...] | EncodedChunks:
        if may_encode and isinstance(found, ChunkRecords):
            blob_ids = found.blob_ids()
            encoded = None if self._codecs_of(blob_ids) else encode_chunks(found, self._tiers_of(blob_ids))
            if encoded is not None:
                return encoded
        found = tuple(found)
        pending = [chunk.key for chunk in found if chunk.digest is None and chunk.is_one_blob]
        digests = await self._pending_digests(bucket, pending) if pending else {}
        details: list[ChunkDetail] = []
        for start in range(0, len(found), DETAILS_A_TURN):
            some = found[start : start + DETAILS_A_TURN]
            blob_ids = [chunk.blob_id for chunk in some]
            tiers, codecs = self._tiers_of(blob_ids), self._codecs_of(blob_ids)
            if is_lossy:
                codecs = {**codecs, **await self._lossy_codecs(bucket, some, tiers)}
            details += [
                ChunkDetail(
                    name(chunk.key),
                    chunk.size_bytes,
                    chunk.digest or digests.get(chunk.key),
                    tier,
                    codecs.get(chunk.blob_id, chunk.codec),
                )
                for chunk, tier in zip(some, tiers, strict=True)
            ]
            if len(details) < len(found):
                await asyncio.sleep(0)
        return tuple(details)

    async def _lossy_codecs(
        self, bucket: BucketRow, chunks: Sequence[MatchedChunk], tiers: Sequence[str]
    ) -> dict[bytes, str]:
        """Codecs of those whose lossy copy is all that there is: of what memory holds that is not so."""
        keys = [chunk.key for chunk, tier in zip(chunks, tiers, strict=True) if tier != "dram"]
        codecs: dict[bytes, str] = {}
        for start in range(0, len(keys), LOOKUP_KEYS):
            for row in await self._catalog.lookup(bucket.name, keys[start : start + LOOKUP_KEYS]):
                if row is not None and row.lossy is not None:
                    codecs[row.blobs[0].blob_id] = spoken_name(row.lossy.codec)
        return codecs

    async def _pending_digests(self, bucket: BucketRow, keys: Sequence[str]) -> dict[str, bytes | None]:
        """Digests that rows do not have yet, once they are known: what is still being computed is waited for."""
        digests: dict[str, bytes | None] = {}
        for start in range(0, len(keys), LOOKUP_KEYS):
            for row in await self._catalog.lookup(bucket.name, keys[start : start + LOOKUP_KEYS]):
                if row is not None:
                    digests[row.key] = (await self._settle(row)).digest
        return digests

    def _bytes_by_tier(
        self, result: MatchResult, details: Sequence[ChunkDetail] | EncodedChunks | None
    ) -> Mapping[str, int]:
        if isinstance(details, EncodedChunks):
            return details.size_by_tier
        if details is not None:
            sizes: dict[str, int] = {}
            for chunk in details:
                sizes[chunk.tier] = sizes.get(chunk.tier, 0) + chunk.size_bytes
            return sizes
        if result.tail is None or not result.tail.blobs:
            return {}
        # Chains leave a tier from their end: where the tail lies, the chunks before it lie as well, or in a faster one.
        (tier,) = self._tiers_of([result.tail.blobs[0].blob_id])
        return {tier: result.size_bytes}

    # -- many chunks at once -------------------------------------------------------------------------------------
    def note_write(self, bucket: str, key: str, *, is_partial: bool, hint: int) -> None:
        """See `api.kv_store.ChunkStore`."""
        self._on_request(RequestTrace(bucket, KeyList([key]), is_partial, hint))

    async def find(self, bucket: BucketRow, chunks: ChunkList, *, caller: Caller) -> list[ObjectRow | None]:
        """The live rows that the caller may read, as GETs of each would find them: rescued, and held against policy."""
        rows: list[ObjectRow | None] = []
        for start in range(0, len(chunks), LOOKUP_KEYS):
            keys = [chunks.key(index) for index in range(start, min(start + LOOKUP_KEYS, len(chunks)))]
            rows += await self._catalog.lookup(bucket.name, keys, rescue=caller.is_owner)
            if len(rows) < len(chunks):
                await asyncio.sleep(0)
        if not caller.is_owner:
            rows = await self._readable(bucket, rows, caller)
        for row in rows:
            if row is not None:
                self._hold(row)
        return rows

    async def _readable(
        self, bucket: BucketRow, rows: Sequence[ObjectRow | None], caller: Caller
    ) -> list[ObjectRow | None]:
        """Those in namespaces that the caller may use; only these are rescued."""
        usable: dict[str, bool] = {}
        for row in rows:
            if row is not None and row.namespace not in usable:
                try:
                    await self._book.open(bucket, row.namespace, caller=caller)
                    usable[row.namespace] = True
                except NoSuchNamespaceError:
                    usable[row.namespace] = False
        seen = [row if row is not None and usable[row.namespace] else None for row in rows]
        keys = [row.key for row in seen if row is not None]
        found: list[ObjectRow | None] = []
        for start in range(0, len(keys), LOOKUP_KEYS):
            found += await self._catalog.lookup(bucket.name, keys[start : start + LOOKUP_KEYS], rescue=True)
        again = iter(found)
        return [None if row is None else next(again) for row in seen]

    def use(self, rows: Sequence[ObjectRow]) -> Callable[[], None]:
        """Keep the bytes of the rows from being reaped until the returned function is called, exactly once."""
        held = [blob_id for row in rows for blob_id in row.blob_ids]
        self._in_use.hold(held)

        def release() -> None:
            self._in_use.release(held)

        return release

    def batch(self, size_bytes: int, *, check_shown: Callable[[ObjectRow], Awaitable[None]]) -> ChunkBatch:
        """Room for chunks of so many bytes, committed in one step; entering it may raise `EntityTooLargeError`, `BusyError`.
        `check_shown`: see `ChunkBatch`."""
        return ChunkBatch(
            size_bytes=size_bytes,
            gate=self._gate,
            start=self._start,
            catalog=self._catalog,
            clock=self._clock,
            check_shown=check_shown,
            reached=self._reached,
            together=self._together,
        )

    # -- sessions and pins ---------------------------------------------------------------------------------------
    async def open_session(self, bucket: BucketRow, *, holder: str, ttl_ms: int | None, caller: Caller) -> SessionRow:
        """See `Leases.open_session`; without a TTL the store's own."""
        return await self._catalog.leases.open_session(
            user=caller.user_id,
            bucket=bucket.name,
            holder=holder,
            ttl_ms=self._lease_ttl_ms if ttl_ms is None else ttl_ms,
            now_boot_ms=boot_ms(self._clock),
        )

    async def renew_session(
        self,
        bucket: BucketRow,
        session_id: bytes,
        *,
        as_of: int,
        pins: int,
        pins_digest: bytes,
        release: Sequence[bytes],
        caller: Caller,
        waited_ms: int = 0,
    ) -> Renewal:
        """See `Leases.renew`."""
        return await self._catalog.leases.renew(
            session_id,
            user=caller.user_id,
            bucket=bucket.name,
            as_of=as_of,
            pins=pins,
            pins_digest=pins_digest,
            release=release,
            now_boot_ms=boot_ms(self._clock) - waited_ms,
        )

    async def close_session(self, bucket: BucketRow, session_id: bytes, *, caller: Caller) -> None:
        """See `Leases.close_session`."""
        await self._catalog.leases.close_session(session_id, user=caller.user_id, bucket=bucket.name)

    async def pin_tails(
        self,
        bucket: BucketRow,
        session_id: bytes,
        tails: ChunkList,
        *,
        release: Sequence[bytes],
        caller: Caller,
        namespace: NamespaceRow | None = None,
        accepts: Sequence[Accepted] = PLAIN,
    ) -> PinsResult:
        """See `api.kv_store.ChunkStore`. Errors as `Leases.pin_tails`."""
        keys = [tails.key(index) for index in range(len(tails))]
        allowed = keys
        if not caller.is_owner and keys:
            seen = await self._catalog.lookup(bucket.name, keys)
            readable = await self._readable(bucket, seen, caller)
            allowed = [key for key, row in zip(keys, readable, strict=True) if row is not None]
        if namespace is None or not self._given.is_sure(namespace, accepts):
            given = await self._given.each(bucket.name, allowed, accepts)
            allowed = [key for key, is_given in zip(allowed, given, strict=True) if is_given]
        result = await self._catalog.leases.pin_tails(
            session_id,
            allowed,
            release=release,
            user=caller.user_id,
            bucket=bucket.name,
            now_boot_ms=boot_ms(self._clock),
        )
        if len(allowed) == len(keys):
            return result
        granted = iter(result.pins)
        permitted = set(allowed)
        pins = tuple([next(granted) if key in permitted else TailPin(key, None) for key in keys])
        return PinsResult(pins, result.grant, result.deadline_ms)
