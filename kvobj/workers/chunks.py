"""The KV API's chunks as a worker process has them: implements `api.kv_store.ChunkStore` over the calls of the store process.

Namespaces are opened here, from rows that are read here; ids of tokens are computed here; what pins, matches and declares is a
call. Event-loop-only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from itertools import count
from typing import cast

from kvobj.api.same_host.rights import Granted, Rights
from kvobj.catalog.chunk_list import ChunkList, IdList
from kvobj.catalog.chunk_records import EncodedChunks
from kvobj.catalog.lease_protocol import PinsResult, Renewal
from kvobj.catalog.lease_rows import SessionRow
from kvobj.catalog.namespace_protocol import NamespaceRow, NamespaceUsage
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketRow, CommitOutcome, Durability, NamespaceQuota, ObjectRow
from kvobj.clock import Clock
from kvobj.errors import KvobjError, UnavailableError
from kvobj.store.batch import ChunkBatch, Reached
from kvobj.store.byte_gate import ByteGate
from kvobj.store.chunk_naming import chunks_of_tokens, count_of_tokens
from kvobj.store.chunk_values import Caller, ChunkDetail, MatchReply, OpenNamespace
from kvobj.store.chunks import TOKENS_INLINE_BYTES
from kvobj.store.given_chunks import PLAIN
from kvobj.store.ingest import PutTransfer
from kvobj.store.key_wrapping import KeyWrapper
from kvobj.store.namespaces import NamespaceBook
from kvobj.store.representation import Accepted
from kvobj.store.requests import PutRequest
from kvobj.workers.calls import Chunks, Matched, StoreCalls
from kvobj.workers.catalog import WorkerCatalog
from kvobj.workers.channel import Channel
from kvobj.workers.store import WorkerStore
from kvobj.workers.wire import error_from
from kvobj.workers.writing import WorkerTransfer


class WorkerChunks:
    """See the module's text."""

    def __init__(
        self,
        *,
        catalog: WorkerCatalog,
        store: WorkerStore,
        channel: Channel,
        calls: StoreCalls,
        wrapper: KeyWrapper,
        clock: Clock,
        executor: Executor,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._channel = channel
        self._calls = calls
        self._clock = clock
        self._executor = executor
        self._book = NamespaceBook(catalog.namespaces, wrapper=wrapper, clock=clock)
        self._entries = count(1)

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
        """See `api.kv_store.ChunkStore`."""
        row, may_write, is_new = await self._calls.declare_namespace(bucket, name, dict(declaration), caller, key)
        opened = await self._book.open(bucket, row.name, caller=caller)
        return OpenNamespace(row, opened.key, may_write=may_write), is_new

    async def namespace(self, bucket: BucketRow, name: str, *, caller: Caller) -> OpenNamespace:
        """See `api.kv_store.ChunkStore`."""
        return await self._book.open(bucket, name, caller=caller)

    async def namespaces(
        self, bucket: BucketRow, *, after: str, limit: int, caller: Caller
    ) -> tuple[tuple[OpenNamespace, NamespaceUsage], ...]:
        """See `api.kv_store.ChunkStore`."""
        opened = await self._book.page(bucket, after=after, limit=limit, caller=caller)
        return tuple([(each, await self.namespace_usage(bucket, each.row.name)) for each in opened])

    async def remove_namespace(self, bucket: BucketRow, name: str, *, caller: Caller) -> int:
        """See `api.kv_store.ChunkStore`."""
        return await self._calls.remove_namespace(bucket, name, caller)

    async def namespace_usage(self, bucket: BucketRow, name: str) -> NamespaceUsage:
        """See `api.kv_store.ChunkStore`."""
        return await self._catalog.namespaces.usage(bucket.name, name)

    # -- match ---------------------------------------------------------------------------------------------------
    async def chunks_of_tokens(self, namespace: OpenNamespace, tokens: bytes) -> ChunkList:
        """See `api.kv_store.ChunkStore`."""
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
        """See `api.kv_store.ChunkStore`."""
        found = await self._calls.match(
            bucket,
            namespace.row.name,
            _sent(chunks),
            caller,
            tokens if explain else None,
            session,
            detail,
            may_encode,
            explain,
            partial_last,
            hint,
            list(accepts),
        )
        return _reply(found, name)

    def note_write(self, bucket: str, key: str, *, is_partial: bool, hint: int) -> None:
        """See `api.kv_store.ChunkStore`."""
        self._channel.tell("note_write", bucket, key, is_partial, hint)

    # -- many chunks at once -------------------------------------------------------------------------------------
    async def find(self, bucket: BucketRow, chunks: ChunkList, *, caller: Caller) -> list[ObjectRow | None]:
        """See `api.kv_store.ChunkStore`."""
        return await self._calls.find(bucket, _sent(chunks), caller)

    def use(self, rows: Sequence[ObjectRow]) -> Callable[[], None]:
        """See `api.kv_store.ChunkStore`."""
        used = self._store.frames.use(blob_id for row in rows for blob_id in row.blob_ids)
        return used.release

    def batch(self, size_bytes: int, *, check_shown: Callable[[ObjectRow], Awaitable[None]]) -> ChunkBatch:
        """See `api.kv_store.ChunkStore`."""
        gate = _RemoteGate(self._channel, self._calls, next(self._entries))
        return _WorkerBatch(
            self._calls,
            size_bytes=size_bytes,
            gate=gate,
            start=self._store.start_in_batch,
            catalog=self._catalog.as_catalog(),
            clock=self._clock,
            check_shown=check_shown,
            reached=self._reached,
        )

    async def _reached(self, rows: Sequence[ObjectRow], bucket: BucketRow, asked: Durability | None) -> list[ObjectRow]:
        return await self._calls.reached(list(rows), bucket, asked)

    # -- sessions and pins ---------------------------------------------------------------------------------------
    async def open_session(self, bucket: BucketRow, *, holder: str, ttl_ms: int | None, caller: Caller) -> SessionRow:
        """See `api.kv_store.ChunkStore`."""
        return await self._calls.open_session(bucket, holder, ttl_ms, caller)

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
        """See `api.kv_store.ChunkStore`."""
        return await self._calls.renew_session(
            bucket, session_id, as_of, pins, pins_digest, list(release), caller, waited_ms
        )

    async def close_session(self, bucket: BucketRow, session_id: bytes, *, caller: Caller) -> None:
        """See `api.kv_store.ChunkStore`."""
        await self._calls.close_session(bucket, session_id, caller)

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
        """See `api.kv_store.ChunkStore`."""
        return await self._calls.pin_tails(
            bucket, session_id, _sent(tails), list(release), caller, namespace, list(accepts)
        )


class RemoteGranting:
    """Implements `api.same_host.rights.Granting`: grants are the store process's, which has the socket."""

    def __init__(self, calls: StoreCalls) -> None:
        self._calls = calls

    async def grant(self, rights: Rights) -> Granted:
        """See `Granting.grant`."""
        return await self._calls.grant(rights)

    async def renew(self, grant_id: bytes, rights: Rights) -> int:
        """See `Granting.renew`."""
        return await self._calls.renew_grant(grant_id, rights)


class _RemoteGate:
    """One batch's place in the gate of all batches (`ByteGate`)."""

    def __init__(self, channel: Channel, calls: StoreCalls, entry: int) -> None:
        self._channel = channel
        self._calls = calls
        self._entry = entry

    async def enter(self, size_bytes: int) -> None:
        """See `ByteGate.enter`."""
        try:
            await self._calls.enter_gate(self._entry, size_bytes)
        except (asyncio.CancelledError, UnavailableError):
            self.leave(size_bytes)  # it may have been let in by then, and be answered too late
            raise

    def leave(self, _size_bytes: int) -> None:
        """See `ByteGate.leave`."""
        self._channel.tell("leave_gate", self._entry)


class _WorkerBatch(ChunkBatch):
    """A batch whose chunks lie in the store process's hands: one call commits them. Its transfers are `WorkerTransfer`s, which do
    all that a batch asks of one."""

    def __init__(
        self,
        calls: StoreCalls,
        *,
        size_bytes: int,
        gate: _RemoteGate,
        start: Callable[[PutRequest], Awaitable[WorkerTransfer]],
        catalog: Catalog,
        clock: Clock,
        check_shown: Callable[[ObjectRow], Awaitable[None]],
        reached: Reached,
    ) -> None:
        super().__init__(
            size_bytes=size_bytes,
            gate=cast("ByteGate", gate),
            start=cast("Callable[[PutRequest], Awaitable[PutTransfer]]", start),
            catalog=catalog,
            clock=clock,
            check_shown=check_shown,
            reached=reached,
        )
        self._calls = calls

    async def _commit_chain(
        self, rows: Sequence[ObjectRow], quota: NamespaceQuota | None, parent_tokens: int
    ) -> list[CommitOutcome | KvobjError]:
        handles = [cast("WorkerTransfer", transfer).handle for transfer in self._transfers]
        found = await self._calls.commit_chain(handles, quota, parent_tokens, self._is_shared)
        outcomes: list[CommitOutcome | KvobjError] = []
        for each in found:
            if each.outcome is not None:
                outcomes.append(each.outcome)
            else:
                assert each.failure is not None
                outcomes.append(error_from(each.failure))
        assert len(outcomes) == len(rows)
        return outcomes


def _sent(chunks: ChunkList) -> Chunks:
    if isinstance(chunks, IdList):
        return Chunks(chunks.raw, None)
    return Chunks(None, [chunks.key(index) for index in range(len(chunks))])


def _reply(found: Matched, name: Callable[[str], str | bytes]) -> MatchReply:
    chunks: tuple[ChunkDetail, ...] | EncodedChunks | None = None
    if found.encoded is not None:
        chunks = EncodedChunks(found.encoded, {})
    elif found.details is not None:
        chunks = tuple(
            [ChunkDetail(name(each.key), each.size_bytes, each.digest, each.tier, each.codec) for each in found.details]
        )
    return MatchReply(
        matched=found.matched,
        tokens=found.tokens,
        size_bytes=found.size_bytes,
        expected_load_ms=found.expected_load_ms,
        pin=found.pin,
        grant=found.grant,
        deadline_ms=found.deadline_ms,
        chunks=chunks,
        explain=found.explain,
    )
