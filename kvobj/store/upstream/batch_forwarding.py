"""Many chunks of class `shared` to an upstream, in their order: parents before children, several in one `?mput`.

Each gets its own answer. What the upstream refuses it refuses alone, with what follows on it; once it does not answer nothing more
is sent, so that all before that stands there and the same batch, sent again, brings the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.errors import (
    CapacityError,
    KvobjError,
    NamespaceConflictError,
    TierUnavailableError,
    UnavailableError,
)
from kvobj.store.chunk_naming import front_of
from kvobj.store.places import ChunkPlace, parent_name
from kvobj.store.upstream.client import ItemAnswer, UpstreamClient
from kvobj.store.upstream.forwarding import DURABILITY_HEADER, Forwarded, Forwarder, check_stored, error_of
from kvobj.tiers.remote.faults import FaultKind, RemoteFault

TOGETHER_BYTES_MAX: Final = 16 * 2**20
"""Of chunks in one request, copied into memory of its own: more gain little, and a stranger's arena may be small."""
TOGETHER_MAX: Final = 256
"""Chunks in one request."""
_FULL: Final = 507
_LENGTH: Final = struct.Struct("<I")

Chunk: TypeAlias = tuple[ObjectRow, ChunkPlace]
"""A live row whose digest is known where it will be, and its place."""
Answered: TypeAlias = Forwarded | KvobjError
AppendBytes: TypeAlias = Callable[[ObjectRow, bytearray], Awaitable[None]]
"""Puts a chunk's bytes, all of them, at the end of the array."""


class BatchForwarder:
    """Of one bucket. Event loop only."""

    def __init__(self, client: UpstreamClient, forwarder: Forwarder) -> None:
        self._client = client
        self._forwarder = forwarder

    async def put_all(self, chunks: Sequence[Chunk], append_bytes: AppendBytes) -> list[Answered]:
        """Store chunks of one namespace there; what became of each, errors as of `Forwarder.put`."""
        answers: list[Answered] = []
        for group in _groups(chunks):
            found = None if len(group) == 1 else await self._put_together(group, append_bytes)
            answers += await self._put_each(group, append_bytes) if found is None else found
            if (lost := _lost(answers)) is not None:
                rest = chunks[len(answers) :]
                answers += [self._forwarder.failed(_unsent(row, lost)) for row, _ in rest]
                break
        return answers

    async def _put_each(self, group: Sequence[Chunk], append_bytes: AppendBytes) -> list[Answered]:
        """One after the other; ends early where the upstream is lost."""
        answers: list[Answered] = []
        for row, place in group:
            try:
                async with self._forwarder.room(row.size_bytes):
                    data = bytearray()
                    await append_bytes(row, data)
                    answers.append(await self._forwarder.put(row, place, memoryview(data)))
            except KvobjError as error:
                answers.append(error)
                if _lost([error]) is not None:
                    break
        return answers

    async def _put_together(self, group: Sequence[Chunk], append_bytes: AppendBytes) -> list[Answered] | None:
        """In one request; None where the upstream takes none like it, and may take each alone."""
        until = self._client.deadline()
        try:
            await self._forwarder.check_namespace(group[0][1], until=until)
            async with self._forwarder.room(sum(row.size_bytes for row, _ in group)):
                stream = bytearray()
                for row, place in group:
                    stream += _framed(_header(row, place))
                    await append_bytes(row, stream)
                stream += _framed({"end": True, "items": len(group)})
                headers = {DURABILITY_HEADER: self._client.settings.durability}
                items = await self._client.put_many(memoryview(stream), headers, count=len(group), until=until)
        except RemoteFault as fault:
            if fault.kind == "client":
                return None
            return [self._forwarder.failed(error_of(fault, row)) for row, _ in group]
        except KvobjError as error:
            return [self._forwarder.failed(error) for _ in group]
        return [self._answer(row, item) for (row, _), item in zip(group, items, strict=True)]

    def _answer(self, row: ObjectRow, item: ItemAnswer) -> Answered:
        try:
            found = _read(row, item)
            check_stored(found, row)
        except RemoteFault as fault:
            return self._forwarder.failed(error_of(fault, row))
        except KvobjError as error:
            return self._forwarder.failed(error)
        self._forwarder.note(found)
        return found


def _groups(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """In order: as many as one request takes. What a stream has no words for, and what is large, goes alone."""
    group: list[Chunk] = []
    size_bytes = 0
    for chunk in chunks:
        row, _ = chunk
        is_alone = bool(row.metadata or row.headers)
        is_over = size_bytes + row.size_bytes > TOGETHER_BYTES_MAX or len(group) == TOGETHER_MAX
        if group and (is_alone or is_over):
            yield group
            group, size_bytes = [], 0
        if is_alone:
            yield [chunk]
            continue
        group.append(chunk)
        size_bytes += row.size_bytes
    if group:
        yield group


def _header(row: ObjectRow, place: ChunkPlace) -> dict[str, object]:
    """An item's header (docs/kv-api.md, "Many at once")."""
    return {
        "id": row.key.removeprefix(front_of(place.namespace)),
        "parent": parent_name(row),
        "namespace": place.namespace.name,
        "tokens": row.tokens or None,
        "size_bytes": row.size_bytes,
        "digest": row.digest,
    }


def _framed(header: dict[str, object]) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return _LENGTH.pack(len(encoded)) + encoded


def _read(row: ObjectRow, item: ItemAnswer) -> Forwarded:
    """`RemoteFault` for a chunk that the upstream did not take."""
    if item.error is not None:
        kind: FaultKind = "full" if item.status == _FULL else "client"
        detail = f"{item.status} {item.error.code}: {item.error.message}"
        raise RemoteFault(kind, detail, code=item.error.code, status=item.status)
    try:
        durability = Durability(item.durability)
    except ValueError as error:
        raise TierUnavailableError("the upstream's answer to a write is none", key=row.key) from error
    return Forwarded(existed=item.existed, durability=durability, digest=item.digest)


def _lost(answers: Sequence[Answered]) -> KvobjError | None:
    """Why it is no use to send more, if it is none."""
    for each in answers:
        if isinstance(each, (UnavailableError, CapacityError, NamespaceConflictError)):
            return each
    return None


def _unsent(row: ObjectRow, lost: KvobjError) -> KvobjError:
    return TierUnavailableError(
        "the chunk is stored here, and the upstream failed before it was its turn", key=row.key, detail=str(lost)
    )
