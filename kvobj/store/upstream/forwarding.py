"""Writes of class `shared` to an upstream: a chunk that stands here is put there too, and what is there is the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from kvobj.catalog.rows import Durability, ObjectRow
from kvobj.errors import (
    ConflictError,
    ImmutableChunkError,
    InvalidRequestError,
    KvobjError,
    LayoutMismatchError,
    NamespaceConflictError,
    ParentNotFoundError,
    StoreFullError,
    TierUnavailableError,
)
from kvobj.store.byte_gate import ByteGate
from kvobj.store.places import DEFAULT_NAMESPACE, ChunkPlace, parent_name
from kvobj.store.upstream.agreement import Agreement
from kvobj.store.upstream.client import (
    DIGEST_HEADER,
    NAMESPACE_HEADER,
    PARENT_HEADER,
    TOKENS_HEADER,
    UpstreamClient,
)
from kvobj.store.upstream.instruments import UpstreamInstruments
from kvobj.store.upstream.object_fields import object_fields
from kvobj.tiers.remote.faults import RemoteFault

FORWARDED_BYTES_MAX: Final = 512 * 2**20
"""A larger chunk is not forwarded: it goes in one PUT, from memory of its own, of which all together have no more than this."""
DURABILITY_HEADER: Final = "x-kvobj-durability"
_DIGEST_DIGITS: Final = 64


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What the upstream answered. `digest` None: it does not know it yet."""

    existed: bool
    durability: Durability
    digest: bytes | None


class Forwarder:
    """Of one bucket. Event loop only."""

    def __init__(self, client: UpstreamClient, agreement: Agreement, instruments: UpstreamInstruments) -> None:
        self._client = client
        self._agreement = agreement
        self._instruments = instruments
        self._gate = ByteGate(limit_bytes=FORWARDED_BYTES_MAX, wait_seconds=client.settings.timeout_seconds)

    @asynccontextmanager
    async def room(self, size_bytes: int) -> AsyncIterator[None]:
        """Memory for a chunk's bytes on their way. `BusyError` where there is none in time."""
        await self._gate.enter(size_bytes)
        try:
            yield
        finally:
            self._gate.leave(size_bytes)

    def check(self, size_bytes: int) -> None:
        """Refuse early what could not be forwarded. `TierUnavailableError`, `InvalidRequestError`."""
        if size_bytes > FORWARDED_BYTES_MAX:
            raise InvalidRequestError(
                "class shared: the chunk is too large to be forwarded to the upstream", limit_bytes=FORWARDED_BYTES_MAX
            )
        if self._client.is_down:
            raise TierUnavailableError("class shared: the upstream does not answer", detail=self._client.trouble)

    async def put(self, row: ObjectRow, place: ChunkPlace, data: memoryview) -> Forwarded:
        """Store a chunk's bytes there, at its place.

        Errors: the upstream's refusals of chunks, as they would be raised here (409); `NamespaceConflictError` where the namespace
        is another there; `StoreFullError`; `TierUnavailableError` for all that may pass.
        """
        until = self._client.deadline()
        try:
            await self.check_namespace(place, until=until)
            answered = await self._client.put(row.key, data, self._headers(row, place), until=until)
            found = _read(answered)
            check_stored(found, row)
        except RemoteFault as fault:
            raise self.failed(error_of(fault, row)) from fault
        except KvobjError as error:
            self.failed(error)
            raise
        self.note(found)
        return found

    async def check_namespace(self, place: ChunkPlace, *, until: float) -> None:
        """Nothing is written in a namespace that is another there: `NamespaceConflictError`. `RemoteFault`."""
        problem = await self._agreement.ask(place.namespace, until=until)
        if problem:
            raise NamespaceConflictError(
                f"the upstream has not the same namespace: {problem}",
                namespace=place.namespace.name,
                differs=("upstream",),
            )

    def note(self, found: Forwarded) -> None:
        """Count a chunk that the upstream has taken, or had."""
        self._instruments.chunk("existed" if found.existed else "put")

    def failed(self, error: KvobjError) -> KvobjError:
        """Count a chunk that the upstream did not take; the error."""
        self._instruments.chunk("refused" if isinstance(error, (ConflictError, InvalidRequestError)) else "unanswered")
        return error

    def _headers(self, row: ObjectRow, place: ChunkPlace) -> dict[str, str]:
        headers = object_fields(row)
        headers |= {DURABILITY_HEADER: self._client.settings.durability, "x-kvobj-want": "digest"}
        if place.namespace.name != DEFAULT_NAMESPACE:
            headers[NAMESPACE_HEADER] = place.namespace.name
        parent = parent_name(row)
        if parent is not None:
            if not (parent.isascii() and parent.isprintable()):
                raise InvalidRequestError("a parent with such a name cannot be forwarded", field=PARENT_HEADER)
            headers[PARENT_HEADER] = parent
        if row.tokens:
            headers[TOKENS_HEADER] = str(row.tokens)
        return headers


def check_stored(found: Forwarded, row: ObjectRow) -> None:
    """What the upstream has stored now has to be what was sent. `TierUnavailableError`."""
    if not found.existed and row.digest is not None and found.digest not in (None, row.digest):
        raise TierUnavailableError("the upstream stored other bytes than were sent", key=row.key)


def _read(answered: Mapping[str, str]) -> Forwarded:
    digest, durability = answered.get(DIGEST_HEADER, ""), answered.get(DURABILITY_HEADER, "")
    try:
        return Forwarded(
            existed=answered.get("x-kvobj-existed") == "true",
            durability=Durability(durability),
            digest=bytes.fromhex(digest) if len(digest) == _DIGEST_DIGITS else None,
        )
    except ValueError as error:
        raise TierUnavailableError("the upstream's answer to a write is none", detail=str(error)) from error


_REFUSALS: Final[Mapping[str, Callable[[str, ObjectRow], KvobjError]]] = {
    "ParentNotFound": lambda message, row: ParentNotFoundError(message, parent=parent_name(row)),
    "ImmutableChunk": lambda message, row: ImmutableChunkError(message, key=row.key),
    "LayoutMismatch": lambda message, _: LayoutMismatchError(message, differs=("upstream",)),
    "NamespaceConflict": lambda message, _: NamespaceConflictError(message, differs=("upstream",)),
}


def error_of(fault: RemoteFault, row: ObjectRow) -> KvobjError:
    """What the writer of the chunk is told of a fault."""
    refused = _REFUSALS.get(fault.code)
    if refused is not None:
        return refused(f"the upstream refuses the chunk: {fault.detail}", row)
    if fault.kind == "full":
        return StoreFullError("the upstream is full", detail=fault.detail)
    return TierUnavailableError("the chunk is stored here, and the upstream did not take it", detail=fault.detail)
