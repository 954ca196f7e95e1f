"""The KV API's calls, one method each, over one KV bucket (docs/kv-api.md). Sessions that renew themselves are in `session`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final, Self, TypeVar

import msgspec
from blake3 import blake3

from kvobj.client.connection import Endpoint, Incoming, SignedConnection
from kvobj.client.credentials import Credentials
from kvobj.client.errors import error_of
from kvobj.client.kv_stream import LENGTH_BYTES, STREAM_TYPE, chunk_stream, header_length, parse_header
from kvobj.client.kv_values import (
    DEFAULT,
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
    StoredChunk,
)
from kvobj.client.pin_ledger import Statement
from kvobj.client.retry import RetryRule
from kvobj.client.transport import MSGPACK, Transport, read_answer
from kvobj.errors import CorruptionError, InvalidRequestError, KvobjError, NoSuchKeyError, UnavailableError
from kvobj.ids.chunk_ids import CHUNK_ID_BYTES, Tokens, token_bytes

TIMEOUT_SECONDS: Final = 30.0
EVENT_WAIT_SECONDS: Final = 30.0
"""A stream of events that is followed says something every ten seconds."""

_LEASE_CONNECTIONS: Final = 2
_OK: Final = 200
_NamespacePage = dict[str, Any]
_event = msgspec.json.Decoder(Event).decode

T = TypeVar("T")


class KvClient:
    """One KV bucket of one server. Synchronous and thread-safe: calls of several threads use connections of their own.

    Every call has a deadline and is made again where the server is busy or a connection broke (`RetryRule`). Bytes that are
    read are hashed and compared with the digest that the server tells, unless `verify` is False. Errors are the typed ones
    of `kvobj.errors`; a chunk that is not stored is None. Calls about sessions have connections of their own beside `connections`:
    a renewal never waits for a read.
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
        region: str = "us-east-1",
    ) -> None:
        place = Endpoint.parse(endpoint) if isinstance(endpoint, str) else endpoint
        self.bucket = bucket
        self._path = f"/{bucket}"
        self._verify = verify

        def transport(connections: int) -> Transport:
            return Transport(
                lambda: SignedConnection(place, credentials, region=region, timeout_seconds=timeout_seconds),
                connections=connections,
                timeout_seconds=timeout_seconds,
                retry=retry or RetryRule(),
            )

        self._transport = transport(connections)
        self._leases = transport(_LEASE_CONNECTIONS)

    def close(self) -> None:
        """Close the connections. Idempotent."""
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
            page: _NamespacePage = self._transport.call("GET", self._path, dict, query=query)
            yield from (msgspec.convert(each, Namespace) for each in page.get("namespaces", ()))
            after = page.get("next_start_after") or ""
            if not after:
                return

    def remove_namespace(self, name: str) -> int:
        """Remove a namespace with all its chunks; how many there were."""
        answer: dict[str, int] = self._call("DELETE", ("namespace", name), dict[str, int])
        return answer["recalled"]

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
    ) -> StoredChunk:
        """Store a chunk. `tokens`: where it is not full; `durability`: `memory`, `local` or `shared`.

        `ParentNotFoundError`, `LayoutMismatchError`, `ImmutableChunkError`, `QuotaExceededError`, `StoreFullError`.
        """
        place = {
            "x-kvobj-namespace": None if namespace is DEFAULT else namespace.name,
            "x-kvobj-parent": parent.hex() if isinstance(parent, bytes) else parent,
            "x-kvobj-tokens": None if tokens is None else str(tokens),
            "x-kvobj-durability": durability,
        }
        headers = {header: value for header, value in place.items() if value is not None}
        body = [memoryview(data).cast("B")]
        path = f"{self._path}/{namespace.key_of(name)}"
        with self._transport.open("PUT", path, headers=headers, body=body) as answer:
            answer.read()
            told = answer.headers
        digest = told.get("x-kvobj-digest")
        return StoredChunk(
            existed=told.get("x-kvobj-existed") == "true",
            durability=told.get("x-kvobj-durability", ""),
            etag=told.get("etag", "").strip('"'),
            digest=bytes.fromhex(digest) if digest else None,
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
        headers = {} if pin is None else {"x-kvobj-pin": pin.hex()}
        query = () if layers is None else (("layers", f"{layers[0]}-{layers[1]}"),)
        path = f"{self._path}/{namespace.key_of(name)}"
        try:
            with self._transport.open(
                "GET", path, query=query, headers=headers, timeout_seconds=timeout_seconds
            ) as answer:
                size_bytes = int(answer.headers.get("content-length", "0"))
                view = _room(into, size_bytes)
                answer.readinto(view)
                digest = answer.headers.get("x-kvobj-digest") if answer.status == _OK else None
        except NoSuchKeyError:
            return None
        self._check(view, bytes.fromhex(digest) if digest else None)
        return view

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
    ) -> MatchAnswer:
        """The longest stored run at the head of a list of chunks, or of what a sequence of tokens makes; pinned in the same step
        where a session is given. `output_tokens` and `partial_last` are hints to the eviction policy."""
        document: dict[str, object] = {"namespace": namespace.name, "detail": "chunks" if detail else "none"}
        if ids is not None:
            document["ids"] = _listed(ids)
        if tokens is not None:
            document["tokens"] = token_bytes(tokens)
        if session is not None:
            document |= {"session": session, "pin": True}
        if explain:
            document["explain"] = True
        if output_tokens or partial_last:
            document["hint"] = {"output_tokens": output_tokens, "partial_last": partial_last}
        return self._call("POST", ("match", ""), MatchAnswer, document)

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
        """End a session and its pins."""
        query = (("sessions", session.hex()),)
        headers = {"accept": MSGPACK}
        with self._leases.open(
            "DELETE", self._path, query=query, headers=headers, timeout_seconds=timeout_seconds
        ) as answer:
            answer.read()

    def pin_tails(
        self,
        session: bytes,
        tails: Sequence[Name],
        *,
        namespace: Namespace = DEFAULT,
        timeout_seconds: float | None = None,
    ) -> PinsAnswer:
        """Pin chunks, each with a pin of its own. `PinLimitExceededError` pins none."""
        document = {"session": session, "namespace": namespace.name, "tails": _listed(tails)}
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
        document: dict[str, object] = {"namespace": namespace.name, "ids": _listed(names)}
        if layers is not None:
            document["layers"] = layers
        if layer_order:
            document["order"] = "layer"
        body = msgspec.msgpack.encode(document)
        item_seconds = self._transport.timeout_seconds if timeout_seconds is None else timeout_seconds
        with self._transport.open(
            "POST",
            self._path,
            query=(("mget", ""),),
            headers={"content-type": MSGPACK},
            body=body,
            timeout_seconds=timeout_seconds,
        ) as answer:
            count = 0
            while True:
                answer.allow(item_seconds)
                header = parse_header(_exactly(answer, header_length(_exactly(answer, LENGTH_BYTES))))
                if header.end:
                    if header.items != count:
                        raise UnavailableError("the stream of chunks is not whole", items=header.items, came=count)
                    answer.read()
                    return
                count += 1
                if header.status != _OK:
                    yield ReadChunk(header.i, header.layer, None)
                    continue
                room = None if into is None else into(header.i, header.layer, header.size_bytes)
                view = _room(room, header.size_bytes)
                answer.readinto(view)
                self._check(view, header.digest)
                yield ReadChunk(header.i, header.layer, view)

    def mput(
        self, chunks: Sequence[NewChunk], *, namespace: Namespace = DEFAULT, durability: str | None = None
    ) -> list[StoredChunk | KvobjError]:
        """Store chunks in one step, parents before their children; for each what a PUT of it tells, or its error."""
        headers = {"content-type": STREAM_TYPE, "accept": MSGPACK}
        if durability is not None:
            headers["x-kvobj-durability"] = durability
        body = chunk_stream(namespace.name, chunks)
        with self._transport.open("POST", self._path, query=(("mput", ""),), headers=headers, body=body) as answer:
            told: dict[str, Any] = read_answer(answer.read(), dict)
        return [_stored(item) for item in told["items"]]

    # -- events --------------------------------------------------------------------------------------------------
    def events(self, *, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """What was stored and removed after an event's number; with `follow` for ever. `UnavailableError` when nothing, not even a
        sign of life, comes for `EVENT_WAIT_SECONDS`: then go on after the last number seen."""
        query = (("events", ""), ("after", str(after))) + ((("follow", ""),) if follow else ())
        with (
            self._transport.own_connection() as connection,
            closing(connection.open("GET", self._path, query=query, headers={"accept": MSGPACK})) as answer,
        ):
            while True:
                answer.allow(EVENT_WAIT_SECONDS)
                line = answer.readline()
                if not line:
                    return
                if line.strip():
                    yield _event(line)

    # -- inside --------------------------------------------------------------------------------------------------
    def _call(self, method: str, query: tuple[str, str], kind: type[T], document: object = None) -> T:
        return self._transport.call(method, self._path, kind, query=(query,), document=document)

    def _lease_call(
        self, method: str, query: tuple[str, str], kind: type[T], document: object, timeout_seconds: float | None
    ) -> T:
        return self._leases.call(
            method, self._path, kind, query=(query,), document=document, timeout_seconds=timeout_seconds
        )

    def _check(self, view: memoryview, digest: bytes | None) -> None:
        if self._verify and digest is not None and blake3(view).digest() != digest:
            raise CorruptionError("the bytes that came are not those that were stored", size_bytes=len(view))


def _listed(names: Sequence[Name]) -> bytes | list[str]:
    """Names as msgpack has them: raw ids end to end, or strings."""
    if names and isinstance(names[0], bytes):
        ids = [name for name in names if isinstance(name, bytes)]
        if len(ids) != len(names) or any(len(each) != CHUNK_ID_BYTES for each in ids):
            raise InvalidRequestError("a list has chunk ids of 32 bytes, or strings")
        return b"".join(ids)
    keys = [name for name in names if isinstance(name, str)]
    if len(keys) != len(names):
        raise InvalidRequestError("a list has chunk ids of 32 bytes, or strings")
    return keys


def _stored(item: Mapping[str, Any]) -> StoredChunk | KvobjError:
    if "error" in item:
        error = item["error"]
        return error_of(item["status"], error["code"], error["message"], error.get("detail") or {})
    return msgspec.convert(item, StoredChunk)


def _room(into: bytearray | memoryview | None, size_bytes: int) -> memoryview:
    if into is None:
        return memoryview(bytearray(size_bytes))
    view = memoryview(into).cast("B")
    if len(view) < size_bytes:
        raise InvalidRequestError(
            "the chunk is larger than the room for it", size_bytes=size_bytes, room_bytes=len(view)
        )
    return view[:size_bytes]


def _exactly(answer: Incoming, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    answer.readinto(memoryview(buffer))
    return bytes(buffer)
