"""The KV API's calls, one method each, over one KV bucket (docs/kv-api.md). Sessions that renew themselves are in `session`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from os import PathLike
from typing import Final, Self, TypeVar

import msgspec

from kvobj.client.call_scope import bounded_seconds
from kvobj.client.chunk_bytes import ChunkBytes
from kvobj.client.connection import Endpoint, SignedConnection, trusting
from kvobj.client.credentials import Credentials
from kvobj.client.following import follow, stored_part
from kvobj.client.http_chunks import HttpChunks, listed
from kvobj.client.kv_values import (
    DEFAULT,
    RAW,
    Buffer,
    Event,
    MatchAnswer,
    Name,
    Namespace,
    NewChunk,
    PinsAnswer,
    ReadChunk,
    RenewalAnswer,
    SessionAnswer,
    StoredBytes,
    StoredChunk,
    StoredPart,
    accepted,
    check_layers,
    check_namespace,
    fits_header,
    parent_text,
)
from kvobj.client.opened_ahead import AHEAD_SECONDS
from kvobj.client.pin_ledger import Statement
from kvobj.client.retry import RetryRule
from kvobj.client.same_host import SameHost
from kvobj.client.same_host_lane import GrantAnswer
from kvobj.client.transport import MSGPACK, NO_DOCUMENT, Transport
from kvobj.client.views import ChunkView
from kvobj.errors import InvalidChunkIdError, InvalidRequestError, KvobjError, UnavailableError
from kvobj.ids.chunk_ids import Tokens, token_bytes

TIMEOUT_SECONDS: Final = 30.0
EVENT_WAIT_SECONDS: Final = 30.0
"""A stream of events that is followed says something every ten seconds."""

_LEASE_CONNECTIONS: Final = 2
_OK: Final = 200
_event = msgspec.json.Decoder(Event).decode

T = TypeVar("T")


class _NamespacePage(msgspec.Struct, frozen=True):
    """Some of a bucket's namespaces, and where the next are."""

    namespaces: list[Namespace] = []
    next_start_after: str | None = None


class _RemovedNamespace(msgspec.Struct, frozen=True):
    """How many chunks went with a namespace."""

    recalled: int


class KvClient:
    """One KV bucket of one server. Synchronous and thread-safe: calls of several threads use connections of their own.

    Every call has a deadline and is made again where the server is busy or a connection broke (`RetryRule`). Bytes that are
    read are hashed and compared with the digest that the server tells, unless `verify` is False. Errors are the typed ones
    of `kvobj.errors`; a chunk that is not stored is None. Calls about sessions have connections of their own beside `connections`:
    a renewal never waits for a read. What is no namespace, such as the name of one, is `TypeError` before anything is sent.

    On the server's own host chunk bytes go by shared memory where the server allows it, and else, as everything else, over HTTP
    (docs/same-host.md); `same_host` False: never. `verify_same_host`: whether what was copied from there is hashed, too; None: as
    `verify` says. In a forked child the client connects anew.

    `ca_bundle`: a PEM file (`~/…`: in the user's home) of the authorities that are trusted in place of the system's, where the
    endpoint is https; `ConfigurationError` for one that cannot be read, or has none.
    """

    def __init__(
        self,
        endpoint: Endpoint | str,
        credentials: Credentials,
        bucket: str,
        *,
        connections: int = 8,
        timeout_seconds: float = TIMEOUT_SECONDS,
        retry: RetryRule | None = None,
        verify: bool = True,
        same_host: bool = True,
        verify_same_host: bool | None = None,
        region: str = "us-east-1",
        ca_bundle: str | PathLike[str] | None = None,
    ) -> None:
        if connections < 1:
            raise InvalidRequestError("a client has at least one connection", connections=connections)
        timeout_seconds = bounded_seconds(timeout_seconds)
        place = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self.bucket = bucket
        self.timeout_seconds: Final = timeout_seconds
        """Of a call that names none."""
        self._path = f"/{bucket}"
        self._verify = verify
        tls = None if ca_bundle is None else trusting(ca_bundle)

        def transport(connections: int) -> Transport:
            return Transport(
                lambda: SignedConnection(place, credentials, region=region, timeout_seconds=timeout_seconds, tls=tls),
                connections=connections,
                timeout_seconds=timeout_seconds,
                retry=retry or RetryRule(),
            )

        self._transport = transport(connections)
        self._leases = transport(_LEASE_CONNECTIONS)
        self._same_host = SameHost(self._grant, self._renew_grant, timeout_seconds=timeout_seconds, is_wanted=same_host)
        self._http = HttpChunks(self._transport, self._path)
        self._bytes = ChunkBytes(
            self._http,
            self._same_host,
            verify=verify,
            verify_same_host=verify if verify_same_host is None else verify_same_host,
        )

    @property
    def is_same_host(self) -> bool:
        """Whether chunk bytes go by shared memory at this moment. Asks the server where that is not known, as at the first use, and
        waits for its answer, for the client's timeout at most; one that said no, or was not there, is not asked again for a while.
        `is_same_host_now` asks nobody."""
        return self._same_host.is_up

    @property
    def is_same_host_now(self) -> bool:
        """As `is_same_host`, as far as it is known without finding out: waits for nothing. False before the first call."""
        return self._same_host.is_known_up

    @property
    def same_host_reason(self) -> str:
        """Why chunk bytes go over HTTP though the server offers shared memory: what kept its socket from being used when that was
        last tried. "" where it is used, was not offered, or was not tried yet; waits for nothing. On another host than the
        server's it is not there, which is no fault."""
        return self._same_host.reason

    @property
    def same_host_fallbacks(self) -> int:
        """How many calls went over HTTP though the server allows shared memory: it was away, or could not serve them so."""
        return self._same_host.fallbacks

    def is_answered(self, *, timeout_seconds: float) -> bool:
        """Whether the server answers at this moment, whatever it says: a call that moves nothing, on a connection that no transfer
        has to give back first. What other calls wait for, room for their bytes for one, it does not wait for. Raises nothing but
        `InvalidRequestError` for a timeout that is no number."""
        timeout_seconds = bounded_seconds(timeout_seconds)
        document = {"namespace": DEFAULT.name, "ids": []}
        query = (("match", ""),)
        try:
            self._leases.call("POST", self._path, dict, query=query, document=document, timeout_seconds=timeout_seconds)
        except UnavailableError:
            return False
        except KvobjError as error:
            return "status" in error.data  # else nothing was asked: the request cannot be written
        return True

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, and has come to its end."""
        return self._leases.is_closed

    def close(self) -> None:
        """Close the connections; views of chunks do not hold any more. What would ask the server is `UnavailableError` from now on,
        also where it waits for a connection; of sessions alone the server is still told that they end. What is under way comes to
        its own end, and is not tried again. Idempotent."""
        self._same_host.close()
        self._transport.close()
        self._leases.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- namespaces ----------------------------------------------------------------------------------------------
    def declare_namespace(self, name: str, declaration: Mapping[str, object]) -> Namespace:
        """Declare a namespace; the same declaration again is fine. `NamespaceConflictError` with `data["differs"]`."""
        return self._call("PUT", ("namespace", name), Namespace, dict(declaration))

    def namespace(self, name: str) -> Namespace:
        """A namespace with its key. `NoSuchNamespaceError`, also for one that the user may not use."""
        return self._call("GET", ("namespace", name), Namespace)

    def namespaces(self) -> Iterator[Namespace]:
        """Those that the user may use, without their keys, in name order."""
        after = ""
        while True:
            query = (("namespaces", ""), ("start-after", after))
            page = self._transport.call("GET", self._path, _NamespacePage, query=query)
            yield from page.namespaces
            if not page.next_start_after:
                return
            if page.next_start_after <= after:
                raise UnavailableError("the list of namespaces does not go on", start_after=page.next_start_after)
            after = page.next_start_after

    def remove_namespace(self, name: str) -> int:
        """Remove a namespace with all its chunks; how many there were."""
        return self._call("DELETE", ("namespace", name), _RemovedNamespace).recalled

    # -- single chunks -------------------------------------------------------------------------------------------
    def put_chunk(
        self,
        name: Name,
        data: Buffer,
        *,
        namespace: Namespace = DEFAULT,
        parent: Name | None = None,
        tokens: int | None = None,
        durability: str | None = None,
        timeout_seconds: float | None = None,
    ) -> StoredChunk:
        """Store a chunk. `data` is sent as it lies, perhaps more than once, and must not change until this returns or raises; then
        it is the caller's again, and nothing here refers to it.

        `parent`: the chunk before it, which is stored, or `ROOT` for the first of a sequence. None says nothing of one, and so the
        chunk is in no chain: who pins what follows on it does not hold it. Only where names are the caller's own (`foreign`, as in
        `DEFAULT`) may it be left out; where ids are kvobj's that is `InvalidRequestError`. `tokens`: where it is not full;
        `durability`: `memory`, `local` or `shared`.

        `ParentNotFoundError`, `LayoutMismatchError`, `ImmutableChunkError`, `QuotaExceededError`, `StoreFullError`.
        """
        check_namespace(namespace)
        return self._bytes.put(
            namespace,
            NewChunk(name, data, parent=parent, tokens=tokens),
            durability=durability,
            timeout_seconds=_seconds(timeout_seconds),
        )

    def get_chunk(
        self,
        name: Name,
        *,
        namespace: Namespace = DEFAULT,
        layers: tuple[int, int] | None = None,
        pin: bytes | None = None,
        into: bytearray | memoryview | None = None,
        timeout_seconds: float | None = None,
    ) -> memoryview | None:
        """A chunk's bytes, or those of layers A to B; None if it is not stored. `pin`: reads what it pins, even if a DELETE has
        hidden it since. `into`: where the bytes go, at its start; the answer is the part that was filled.

        `CorruptionError` for bytes that are not what the server says they are.
        """
        check_namespace(namespace)
        return self._bytes.get(
            name,
            namespace,
            layers=check_layers(layers),
            pin=pin,
            into=into,
            timeout_seconds=_seconds(timeout_seconds),
        )

    def get_stored(
        self,
        name: Name,
        *,
        namespace: Namespace = DEFAULT,
        accept: Sequence[str],
        max_error: float | None = None,
        pin: bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> StoredBytes | None:
        """A chunk as it is stored, if that is one of the codecs that are accepted (`raw`, `x3`, `eq4` …): a frame, to be decoded by
        the reader. Else its plain bytes where `raw` is accepted; None if neither is to be had.

        `max_error`: a lossy copy whose values are further off than this is not taken; with it, `raw` takes what such a copy
        decodes to. A codec may have a bound of its own, as `StoredBytes.lossy` tells it (`eq4;max-error=0.03`). Always over HTTP.
        Plain bytes are hashed as by `get_chunk`; a frame is checked by who decodes it.
        """
        check_namespace(namespace)
        return self._bytes.get_stored(
            name, namespace, accept=accept, max_error=max_error, pin=pin, timeout_seconds=_seconds(timeout_seconds)
        )

    def view_chunk(
        self,
        name: Name,
        *,
        namespace: Namespace = DEFAULT,
        pin: bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> ChunkView | None:
        """A chunk to be looked at where it is; None if it is not stored. On the same host nothing is copied: see `ChunkView`, which
        is released by the caller. Elsewhere the bytes are read into memory of their own. `pin` as for `get_chunk`."""
        check_namespace(namespace)
        return self._bytes.view(name, namespace, pin=pin, timeout_seconds=_seconds(timeout_seconds))

    def view_chunks(
        self,
        names: Sequence[Name],
        *,
        namespace: Namespace = DEFAULT,
        pins: Sequence[bytes | None] = (),
        timeout_seconds: float | None = None,
    ) -> list[ChunkView | None]:
        """`view_chunk` of many by one question, in the order of `names`; None for a miss. `pins`: none, one for all, or one each.

        On the same host all of them are held at once: what the server has no room to pin beside the others comes over HTTP, into
        memory of its own, each within the timeout (awaited: all within one). Each view is released by itself. If this raises, none
        is left to be released.
        """
        check_namespace(namespace)
        return self._bytes.view_many(names, namespace, pins=pins, timeout_seconds=_seconds(timeout_seconds))

    def get_chunks(
        self,
        names: Sequence[Name],
        rooms: Sequence[memoryview],
        *,
        namespace: Namespace = DEFAULT,
        pin: bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> list[int | None]:
        """Each chunk's bytes at the start of its writable room; how many they are, None for a miss. `pin` as for `get_chunk`. The
        timeout is for each part of a list that is read in several, and for each chunk that comes over HTTP behind the first
        (awaited: for all of it).

        `InvalidRequestError` for a room that is too small, before a byte of it is written (on the same host: of any room).
        `CorruptionError` as `get_chunk`; what the rooms hold then is undefined.
        """
        check_namespace(namespace)
        return self._bytes.get_many(names, rooms, namespace, pin=pin, timeout_seconds=_seconds(timeout_seconds))

    def open_ahead(
        self, names: Sequence[Name], *, namespace: Namespace = DEFAULT, seconds: float = AHEAD_SECONDS
    ) -> None:
        """Chunks that are going to be read by one `get_chunks`, or looked at (`view_chunk`, `view_chunks`), without a pin: on the
        same host the server shows now where they lie, if it has them in memory and may keep them there, and the read asks nobody.
        Elsewhere this does nothing. It counts as a read.

        The bytes that are read are then those of now, also where a DELETE hides them before. Each is read so once, within so many
        seconds, at most `opened_ahead.AHEAD_SECONDS`; `drop_ahead` where that is not going to happen. Raises nothing: what is no
        name is left out, and refused where it is read.
        """
        check_namespace(namespace)
        self._bytes.open_ahead(names, namespace, seconds=seconds)

    def drop_ahead(self, names: Sequence[Name], *, namespace: Namespace = DEFAULT) -> None:
        """These are not going to be read, or what is read is to be asked for anew. Sends nothing itself; raises nothing."""
        check_namespace(namespace)
        self._bytes.drop_ahead(names, namespace)

    # -- layer by layer ------------------------------------------------------------------------------------------
    def put_part(
        self,
        name: Name,
        data: Buffer,
        *,
        part: tuple[int, int],
        namespace: Namespace,
        parent: Name | None = None,
        tokens: int | None = None,
        durability: str | None = None,
        timeout_seconds: float | None = None,
    ) -> StoredPart:
        """Store part `(index, count)` of a chunk, along the namespace's `part_axis`; index counts from 0. The chunk is visible once
        all are there, in whatever order and by whichever writers. The parent may be coming in parts itself; where it is not whole
        when the last part is there, that part is refused (`ParentNotFoundError`) and is put again later. A parent's
        name goes in a header here: `InvalidChunkIdError` for one that is not printable ASCII, or has a space at either end.
        `LayoutMismatchError` where the writers do not agree, `NoSuchUploadError` where a DELETE gave the parts up: put all of them
        again. Else as `put_chunk`: whose `data` is, and what `parent` says, which is the same for all parts."""
        check_namespace(namespace)
        key, parent = namespace.key_of(name), parent_text(namespace, parent)
        if parent is not None and not fits_header(parent):
            raise InvalidChunkIdError(
                "no header carries the parent's name, which is to be printable ASCII without a space at either end: put the chunk "
                "whole, by put_chunk or mput",
                parent=parent,
            )
        place = {
            "x-kvobj-namespace": namespace.name,
            "x-kvobj-parent": parent,
            "x-kvobj-tokens": None if tokens is None else str(tokens),
            "x-kvobj-part": f"{part[0]}/{part[1]}",
            "x-kvobj-durability": durability,
        }
        headers = {header: value for header, value in place.items() if value is not None}
        path = f"{self._path}/{key}"
        body = [memoryview(data).cast("B")]
        with self._transport.open(
            "PUT", path, headers=headers, body=body, timeout_seconds=_seconds(timeout_seconds)
        ) as answer:
            answer.read()
            return stored_part(answer)

    def follow_chunk(
        self,
        name: Name,
        *,
        namespace: Namespace = DEFAULT,
        layers: tuple[int, int] | None = None,
        wait_seconds: float = 0.0,
        timeout_seconds: float | None = None,
    ) -> Iterator[memoryview]:
        """A chunk's bytes while it is still being put, each piece in memory of its own, as they come; with `layers` (A to B) one
        view a layer. A stored chunk comes at once. Only the iteration's end says that what has come is a chunk's:
        `UnavailableError` where the upload was given up, or nothing came within the timeout (for each piece), `CorruptionError`.

        `NoSuchKeyError` where nobody puts the chunk, and nobody has begun to within `wait_seconds`. Keeps one connection.
        """
        check_namespace(namespace)
        return follow(
            self._transport,
            f"{self._path}/{namespace.key_of(name)}",
            layers=check_layers(layers),
            wait_seconds=bounded_seconds(wait_seconds),
            timeout_seconds=self._transport.timeout_seconds
            if timeout_seconds is None
            else bounded_seconds(timeout_seconds),
            verify=self._verify,
        )

    # -- match ---------------------------------------------------------------------------------------------------
    def match(
        self,
        *,
        namespace: Namespace = DEFAULT,
        ids: Sequence[Name] | None = None,
        tokens: Tokens | None = None,
        session: bytes | None = None,
        detail: bool = False,
        explain: bool = False,
        output_tokens: int = 0,
        partial_last: bool = False,
        accept: Sequence[str] = (RAW,),
        max_error: float | None = None,
        timeout_seconds: float | None = None,
    ) -> MatchAnswer:
        """The longest stored run at the head of a list of chunks, or of what a sequence of tokens makes; pinned in the same step
        where a session is given (then who has it checks that no more is told than was asked for, and lets go of the pin where it
        is). `output_tokens` and `partial_last` are hints to the eviction policy.

        Stored is what `get_stored` with the same `accept` and `max_error` would give, by default what `get_chunk` would: a chunk of
        which a lossy copy alone is left ends the run of who does not take that."""
        check_namespace(namespace)
        document: dict[str, object] = {"namespace": namespace.name, "detail": "chunks" if detail else "none"}
        document |= _accepting(accept, max_error)
        if ids is not None:
            document["ids"] = listed(ids)
        if tokens is not None:
            document["tokens"] = token_bytes(tokens)
        if session is not None:
            document |= {"session": session, "pin": True}
        if explain:
            document["explain"] = True
        if output_tokens or partial_last:
            document["hint"] = {"output_tokens": output_tokens, "partial_last": partial_last}
        answer = self._call("POST", ("match", ""), MatchAnswer, document, _seconds(timeout_seconds))
        if session is None:
            answer.check(ids)  # else by who has the session, and a pin to release
        return answer

    # -- sessions and pins, as `session.Session` needs them ------------------------------------------------------
    def open_session(self, *, holder: str, ttl_ms: int, timeout_seconds: float | None = None) -> SessionAnswer:
        """Register a holder. Somebody must renew it."""
        document = {"holder": holder, "ttl_ms": ttl_ms}
        return self._lease_call("POST", ("sessions", ""), SessionAnswer, document, timeout_seconds)

    def renew_session(
        self, session: bytes, statement: Statement, *, timeout_seconds: float | None = None
    ) -> RenewalAnswer:
        """Extend a session. `NoSuchSessionError`, `SessionExpiredError`: its pins are gone."""
        document = {
            "as_of": statement.as_of,
            "pins": statement.pins,
            "pins_digest": statement.pins_digest,
            "release": statement.release,
        }
        query = ("sessions", session.hex())
        return self._lease_call("PUT", query, RenewalAnswer, document, timeout_seconds)

    def close_session(self, session: bytes, *, timeout_seconds: float | None = None) -> None:
        """End a session and its pins; also after `close`."""
        query = (("sessions", session.hex()),)
        headers = {"accept": MSGPACK}
        with self._leases.open(
            "DELETE", self._path, query=query, headers=headers, timeout_seconds=timeout_seconds, is_last=True
        ) as answer:
            answer.read()

    def pin_tails(
        self,
        session: bytes,
        tails: Sequence[Name],
        *,
        namespace: Namespace = DEFAULT,
        timeout_seconds: float | None = None,
        accept: Sequence[str] = (RAW,),
        max_error: float | None = None,
    ) -> PinsAnswer:
        """Pin chunks, each with a pin of its own; live is what `match` would find. `PinLimitExceededError` pins none. Whether the
        answer has as many as were asked for is the caller's to check, who has to release them where it does not."""
        check_namespace(namespace)
        document: dict[str, object] = {"session": session, "namespace": namespace.name, "tails": listed(tails)}
        document |= _accepting(accept, max_error)
        return self._lease_call("POST", ("pins", ""), PinsAnswer, document, timeout_seconds)

    # -- many at once --------------------------------------------------------------------------------------------
    def mget(
        self,
        names: Sequence[Name],
        *,
        namespace: Namespace = DEFAULT,
        layers: tuple[int, int] | None = None,
        layer_order: bool = False,
        into: Callable[[int, int | None, int], memoryview | None] | None = None,
        timeout_seconds: float | None = None,
    ) -> Iterator[ReadChunk]:
        """Chunks as they come, in the order of the list or layer by layer. `into(index, layer, size_bytes)` gives the room for an
        item, or None for new memory. `CorruptionError`; `UnavailableError` if the stream breaks off: what came before is right. The
        timeout is for each item."""
        check_namespace(namespace)
        return self._bytes.stream(
            names,
            namespace,
            layers=check_layers(layers),
            layer_order=layer_order,
            into=into,
            timeout_seconds=_seconds(timeout_seconds),
        )

    def mput(
        self,
        chunks: Sequence[NewChunk],
        *,
        namespace: Namespace = DEFAULT,
        durability: str | None = None,
        timeout_seconds: float | None = None,
    ) -> list[StoredChunk | KvobjError]:
        """Store chunks in one step, parents before their children; for each what a PUT of it tells, or its error. Of more than
        1,000, or of a quarter of the server's memory, none is stored: `InvalidRequestError`. Their bytes must not change until this
        returns or raises, as those of `put_chunk`."""
        check_namespace(namespace)
        return self._bytes.put_many(namespace, chunks, durability=durability, timeout_seconds=_seconds(timeout_seconds))

    def mput_batches(
        self, batches: Sequence[Sequence[NewChunk]], *, namespace: Namespace = DEFAULT, durability: str | None = None
    ) -> list[list[StoredChunk | KvobjError] | KvobjError]:
        """As `mput` of batches that have nothing to do with each other: for each what that answers, or raises. On the same host the
        server works at one while the bytes of another are copied."""
        check_namespace(namespace)
        return self._bytes.put_batches(namespace, batches, durability=durability)

    # -- events --------------------------------------------------------------------------------------------------
    def events(self, *, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """What was stored and removed after an event's number; with `follow` for ever. `UnavailableError` when nothing, not even a
        sign of life, comes for `EVENT_WAIT_SECONDS`: then go on after the last number seen."""
        query = (("events", ""), ("after", str(after))) + ((("follow", ""),) if follow else ())
        with (
            self._transport.own_connection() as connection,
            closing(
                self._transport.open_on(connection, "GET", self._path, query=query, headers={"accept": MSGPACK})
            ) as answer,
        ):
            if answer.status != _OK:
                raise UnavailableError("the answer is no list of events", status=answer.status)
            while True:
                answer.allow(EVENT_WAIT_SECONDS)
                line = answer.readline()
                if not line:
                    return
                if line.strip():
                    yield _event_of(line)

    # -- inside --------------------------------------------------------------------------------------------------
    def _call(
        self,
        method: str,
        query: tuple[str, str],
        kind: type[T],
        document: object = None,
        timeout_seconds: float | None = None,
    ) -> T:
        return self._transport.call(
            method, self._path, kind, query=(query,), document=document, timeout_seconds=timeout_seconds
        )

    def _lease_call(
        self, method: str, query: tuple[str, str], kind: type[T], document: object, timeout_seconds: float | None
    ) -> T:
        return self._leases.call(
            method, self._path, kind, query=(query,), document=document, timeout_seconds=timeout_seconds
        )

    def _grant(self, timeout_seconds: float) -> GrantAnswer:
        query = (("same-host", ""),)
        return self._leases.call("POST", self._path, GrantAnswer, query=query, timeout_seconds=timeout_seconds)

    def _renew_grant(self, grant_id: bytes) -> None:
        self._leases.call("POST", self._path, dict, query=(("same-host", grant_id.hex()),))


def _event_of(line: bytes) -> Event:
    """`UnavailableError` for what is none: then this is not the server it was taken for."""
    try:
        return _event(line)
    except NO_DOCUMENT as error:
        raise UnavailableError("a line that is no event", reason=str(error)) from error


def _accepting(accept: Sequence[str], max_error: float | None) -> dict[str, list[str]]:
    """What a document says of the codecs that are accepted: nothing where it is what everybody takes."""
    items = accepted(accept, max_error)
    return {} if items == [RAW] else {"accept": items}


def _seconds(timeout_seconds: float | None) -> float | None:
    return None if timeout_seconds is None else bounded_seconds(timeout_seconds)
