"""KV buckets with an upstream, for the API: what is not here is asked for there, between the handlers and store.

`UpstreamStore` and `UpstreamChunks` stand in front of the node's store and chunks, or of a worker's; all that has nothing to do
with upstreams goes straight through, as do buckets without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import msgspec

from kvobj.api.kv_store import ChunkStore
from kvobj.api.object_store import ObjectStore, Reader, Transfer
from kvobj.api.upstream_writes import ForwardedBatch, ForwardedTransfer, UpstreamWrites
from kvobj.catalog.chunk_list import ChunkList, IdList
from kvobj.catalog.chunk_records import EncodedChunks
from kvobj.catalog.rows import BucketRow, Checksum, ObjectRow, UploadRow, WriteCondition
from kvobj.errors import NoSuchKeyError, NoSuchNamespaceError
from kvobj.store.batch import ChunkBatch
from kvobj.store.chunk_naming import front_of
from kvobj.store.chunk_values import Caller, ChunkDetail, MatchReply, MissExplanation, OpenNamespace
from kvobj.store.given_chunks import PLAIN
from kvobj.store.groups import GroupStart, GroupState
from kvobj.store.multipart import CompletedPart
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace, default_namespace, expected_bytes
from kvobj.store.representation import Accepted, takes_raw
from kvobj.store.requests import PutRequest, PutResult
from kvobj.store.upstream.agreement import Agreement
from kvobj.store.upstream.client import MatchAnswer, UpstreamClient
from kvobj.store.upstream.fetching import Fetcher, Outcome
from kvobj.store.upstream.passing import Passed, Passing, is_passed
from kvobj.tiers.remote.faults import RemoteFault

TIER: Final = "upstream"
"""What a match calls the tier of a chunk that is there alone."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """What asks one bucket's upstream."""

    client: UpstreamClient
    agreement: Agreement
    fetcher: Fetcher
    passing: Passing
    writes: UpstreamWrites

    @property
    def may_ask(self) -> bool:
        """Whether the current request may be asked about there: it did not come from there, and an answer may come."""
        return not (self.client.via.is_at_end or self.client.is_down)

    async def match(
        self, namespace: OpenNamespace, chunks: ChunkList, *, detail: bool, explain: bool
    ) -> MatchAnswer | None:
        """What it has of the list; None where it does not say, or the namespace is another there. The whole list is asked for: a
        run begins at the root of its chain, wherever the part of it that is here ends."""
        row = namespace.row
        until = self.client.deadline()
        if isinstance(chunks, IdList):
            ids: object = chunks.raw
        else:
            front = len(front_of(row))
            ids = [chunks.key(index)[front:] for index in range(len(chunks))]
        document = {
            "namespace": row.name,
            "ids": ids,
            "detail": "chunks" if detail else "none",
            "explain": explain,
        }
        try:
            async with asyncio.timeout_at(until):
                if await self.agreement.ask(row, until=until):
                    return None
                found = await self.client.match(document, until=until)
        except (RemoteFault, TimeoutError):
            return None
        if found is None or not 0 <= found.matched <= len(chunks):
            return None
        if detail and (found.chunks is None or len(found.chunks) != found.matched):
            return None
        return found


Upstreams = Mapping[str, Upstream]
"""By the name of the bucket here."""


class UpstreamStore:
    """See the module's text; `as_store` is an `ObjectStore`. Event-loop-only."""

    def __init__(self, inner: ObjectStore, upstreams: Upstreams) -> None:
        self._inner = inner
        self._upstreams = upstreams

    def as_store(self) -> ObjectStore:
        """Itself, for who needs the protocol: `__getattr__` gives what is not written down here."""
        return cast("ObjectStore", self)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the store has
        return getattr(self._inner, name)

    async def look_up(self, bucket: str, key: str, *, will_open: bool = False) -> ObjectRow | None:
        """See `ObjectStore.look_up`; what is not here is fetched first. Of a chunk that cannot be stored here the row is the
        upstream's, whose bytes are read when it is opened."""
        row = await self._inner.look_up(bucket, key, will_open=will_open)
        upstream = None if row is not None else self._upstreams.get(bucket)
        if upstream is None or not upstream.may_ask:
            return row
        bucket_row = await self._inner.catalog.bucket(bucket)
        if bucket_row is None:
            return None
        found = await upstream.fetcher.fetch(bucket_row, key, until=upstream.client.deadline())
        if found.outcome is Outcome.STORED:
            return await self._inner.look_up(bucket, key, will_open=will_open)
        return found.row

    async def open(self, row: ObjectRow, start: int, stop: int) -> Reader | None:
        """See `ObjectStore.open`. `NoSuchKeyError` where what is handed on is not to be had: looking again would not help."""
        upstream = self._upstreams.get(row.bucket) if is_passed(row) else None
        if upstream is None:
            return await self._inner.open(row, start, stop)
        passed = await upstream.passing.open(row)
        if passed is None:
            raise NoSuchKeyError("no such key", bucket=row.bucket, key=row.key)
        return _PassedReader(passed, start, stop)

    async def represent(self, row: ObjectRow, accepts: Sequence[Accepted]) -> ObjectRow | None:
        """See `ObjectStore.represent`: what is handed on is raw."""
        if is_passed(row):
            return row if takes_raw(accepts) else None
        return await self._inner.represent(row, accepts)

    # -- writes --------------------------------------------------------------------------------------------------
    async def start_put(self, request: PutRequest) -> Transfer:
        """See `ObjectStore.start_put`. A whole chunk of class shared is also put to the upstream, which has to take it; of a part
        the whole will be."""
        writes = self._writes(request)
        if writes is None or request.place is None or request.part is not None:
            return await self._inner.start_put(request)
        here = writes.here(request)
        if not writes.is_meant(request.bucket, request.durability):
            return await self._inner.start_put(here)
        writes.check(request.size_bytes)
        return ForwardedTransfer(await self._inner.start_put(here), request, request.place, writes)

    async def copy(
        self,
        source: ObjectRow,
        start: int,
        stop: int,
        request: PutRequest,
        *,
        checksums: tuple[Checksum, ...] = (),
        checksum_algorithm: str | None = None,
    ) -> PutResult | None:
        """See `ObjectStore.copy`; as `start_put`."""
        writes = None if request.part is not None or request.place is None else self._writes(request)
        is_meant = writes is not None and writes.is_meant(request.bucket, request.durability)
        if writes is not None:
            if is_meant:
                writes.check(stop - start)
            request = writes.here(request)
        result = await self._inner.copy(
            source, start, stop, request, checksums=checksums, checksum_algorithm=checksum_algorithm
        )
        if result is None or writes is None or not is_meant or request.place is None:
            return result
        return await writes.forwarded(result, request.place)

    async def start_group_part(self, request: PutRequest) -> GroupStart:
        """See `ObjectStore.start_group_part`."""
        writes, place = self._writes(request), request.place
        if writes is None or place is None:
            return await self._inner.start_group_part(request)
        is_meant = writes.is_meant(request.bucket, request.durability)
        if is_meant:
            writes.check(expected_bytes(msgspec.structs.replace(place, group=None)) or request.size_bytes)
        start = await self._inner.start_group_part(writes.here(request))
        if start.request is not None:
            return GroupStart(request=msgspec.structs.replace(start.request, durability=request.durability))
        if start.existing is not None and is_meant and start.existing.namespace == place.namespace.name:
            return GroupStart(existing=(await writes.forward(start.existing, place))[0])
        return start

    async def end_group(
        self, request: PutRequest, transfer: Transfer | None = None, *, checksums: tuple[Checksum, ...] = ()
    ) -> GroupState:
        """See `ObjectStore.end_group`. The writer whose part makes the chunk whole has it put to the upstream, and each whose part
        came when it was."""
        state = await self._inner.end_group(request, transfer, checksums=checksums)
        writes, place = self._writes(request), request.place
        if state.result is None or writes is None or place is None:
            return state
        if not writes.is_meant(request.bucket, request.durability):
            return state
        result = await writes.forwarded(state.result, place)
        return replace(state, result=result, existed=result.existed)

    async def complete_upload(
        self,
        bucket: BucketRow,
        upload: UploadRow,
        parts: Sequence[CompletedPart],
        *,
        condition: WriteCondition | None = None,
        checksums: tuple[Checksum, ...] = (),
        size_bytes: int | None = None,
    ) -> PutResult:
        """See `ObjectStore.complete_upload`; as `start_put`. What cannot be forwarded now is refused while the upload stands."""
        upstream = self._upstreams.get(bucket.name)
        is_meant = upstream is not None and upstream.writes.is_meant(bucket, upload.durability)
        if upstream is not None and is_meant:
            listed = {part.number for part in parts}
            uploaded = await self._inner.catalog.parts(bucket.name, upload.key, upload.upload_id)
            upstream.writes.check(sum(part.size_bytes for part in uploaded if part.number in listed))
        result = await self._inner.complete_upload(
            bucket, upload, parts, condition=condition, checksums=checksums, size_bytes=size_bytes
        )
        if upstream is None or not is_meant:
            return result
        return await upstream.writes.forwarded(result, await self._place(bucket, upload))

    async def _place(self, bucket: BucketRow, upload: UploadRow) -> ChunkPlace:
        if upload.namespace in ("", DEFAULT_NAMESPACE):
            return ChunkPlace(default_namespace(bucket.name), upload.parent, upload.tokens)
        namespace = await self._inner.catalog.namespaces.namespace(bucket.name, upload.namespace)
        # Declared anew since the upload was completed, it is none that the chunk is of.
        if namespace is None or upload.namespace_root != namespace.root:
            raise NoSuchNamespaceError("no such namespace", bucket=bucket.name, namespace=upload.namespace)
        return ChunkPlace(namespace, upload.parent, upload.tokens)

    def _writes(self, request: PutRequest) -> UpstreamWrites | None:
        upstream = self._upstreams.get(request.bucket.name)
        return None if upstream is None else upstream.writes


class UpstreamChunks:
    """See the module's text; `as_chunks` is a `ChunkStore`. Event-loop-only."""

    def __init__(self, inner: ChunkStore, store: ObjectStore, upstreams: Upstreams) -> None:
        self._inner = inner
        self._store = store
        self._upstreams = upstreams
        self._writes = {bucket: upstream.writes for bucket, upstream in upstreams.items()}

    def as_chunks(self) -> ChunkStore:
        """Itself, for who needs the protocol."""
        return cast("ChunkStore", self)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the chunks have
        return getattr(self._inner, name)

    def batch(self, size_bytes: int, *, check_shown: Callable[[ObjectRow], Awaitable[None]]) -> ChunkBatch:
        """See `ChunkStore.batch`. Chunks of class shared are also put to the upstream, in their order."""
        inner = self._inner.batch(size_bytes, check_shown=check_shown)
        return cast("ChunkBatch", ForwardedBatch(inner, self._writes))

    async def find(self, bucket: BucketRow, chunks: ChunkList, *, caller: Caller) -> list[ObjectRow | None]:
        """See `ChunkStore.find`; what is not here is fetched first."""
        rows = await self._inner.find(bucket, chunks, caller=caller)
        upstream = self._upstreams.get(bucket.name)
        away = [] if upstream is None else [chunks.key(index) for index, row in enumerate(rows) if row is None]
        if upstream is None or not away or not upstream.may_ask:
            return rows
        # Some are here, and the caller may not read them.
        absent = [
            key
            for key, row in zip(away, await self._store.catalog.lookup(bucket.name, away), strict=True)
            if row is None
        ]
        keys = list(dict.fromkeys(absent))
        if await upstream.fetcher.fetch_all(bucket, keys, until=upstream.client.deadline(), is_run=False):
            rows = await self._inner.find(bucket, chunks, caller=caller)
        return rows

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
        """See `ChunkStore.match`. Without a pin the run counts what either has; for a pin the rest of it is fetched first, as far
        as the time allows, and the run is what is here then and pinned."""
        upstream = self._upstreams.get(bucket.name)

        async def here(*, session: bytes | None, detail: bool = detail, explain: bool = explain) -> MatchReply:
            return await self._inner.match(
                bucket,
                namespace,
                chunks,
                caller=caller,
                tokens=tokens,
                session=session,
                detail=detail,
                name=name,
                may_encode=may_encode and (upstream is None or session is not None),
                explain=explain,
                partial_last=partial_last,
                hint=hint,
                accepts=accepts,
            )

        if upstream is None or not upstream.may_ask or not takes_raw(accepts):
            return await here(session=session)
        # Without a pin at first: who gives the match up while the rest is fetched would leave one that nobody knows of.
        is_answer = session is None
        found = await here(session=None, detail=detail and is_answer, explain=explain and is_answer)
        there: MatchAnswer | None = None
        if found.matched < len(chunks):
            there = await upstream.match(namespace, chunks, detail=detail and is_answer, explain=explain and is_answer)
        is_longer = there is not None and there.matched > found.matched
        if is_answer:
            return _both(found, there, chunks, name) if there is not None and is_longer else found
        if there is not None and is_longer:
            keys = [chunks.key(index) for index in range(found.matched, there.matched)]
            await upstream.fetcher.fetch_all(bucket, keys, until=upstream.client.deadline(), is_run=True)
        return await here(session=session)


def _both(here: MatchReply, there: MatchAnswer, chunks: ChunkList, name: Callable[[str], str | bytes]) -> MatchReply:
    """The longer run, of which the upstream alone has the end."""
    more = there.size_bytes - here.size_bytes
    details: tuple[ChunkDetail, ...] | EncodedChunks | None = here.chunks
    if isinstance(details, tuple) and there.chunks is not None:
        details += tuple(
            [
                ChunkDetail(name(chunks.key(index)), each.size_bytes, each.digest, TIER, "raw")
                for index, each in enumerate(there.chunks[here.matched :], start=here.matched)
            ]
        )
    explanation = there.explain
    return replace(
        here,
        matched=there.matched,
        tokens=there.tokens,
        size_bytes=there.size_bytes,
        expected_load_ms=here.expected_load_ms + there.expected_load_ms * max(0, more) // max(1, there.size_bytes),
        chunks=details,
        explain=None
        if explanation is None
        else MissExplanation(explanation.at, explanation.reason, explanation.when_ms, explanation.namespace_differs),
    )


class _PassedReader:
    """Implements `object_store.Reader` over bytes in memory."""

    tier = TIER

    def __init__(self, passed: Passed, start: int, stop: int) -> None:
        self._data = passed.data[start:stop]
        self._release = passed.release
        self.length: int | None = len(self._data)

    async def views(self) -> AsyncIterator[memoryview]:
        """See `BodyStream.views`."""
        yield self._data

    async def aclose(self) -> None:
        """See `BodyStream.aclose`."""
        self._release()
