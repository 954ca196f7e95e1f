"""Chunk bytes over HTTP: single chunks and streams of many, as docs/kv-api.md has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from kvobj.client.errors import error_of
from kvobj.client.incoming import Incoming
from kvobj.client.kv_stream import LENGTH_BYTES, STREAM_TYPE, chunk_stream, header_length, parse_header
from kvobj.client.kv_values import (
    DEFAULT,
    RAW,
    Name,
    Namespace,
    NewChunk,
    StoredBytes,
    StoredChunk,
    accepted,
    check_writable,
    fits_header,
    parent_text,
)
from kvobj.client.transport import MSGPACK, Fetched, Transport, read_answer
from kvobj.errors import InvalidChunkIdError, InvalidRequestError, KvobjError, NoSuchKeyError, UnavailableError
from kvobj.ids.chunk_ids import CHUNK_ID_BYTES

_OK: Final = 200
_PARTIAL: Final = 206
REQUEST_ID: Final = "x-amz-request-id"
"""What every answer to a GET of a key has, of a chunk or of an ordinary object, whole or in part, from wherever its bytes come. A
page that a proxy answers instead has a status, a length and often an ETag, but not this."""

Rooms = Callable[[int, int | None, int], memoryview | None]
"""`(index, layer, size_bytes)` → where an item's bytes go, or None for new memory."""


@dataclass(frozen=True, slots=True)
class ArrivedItem:
    """One item of a stream; `data` None: it is not stored. `digest`: what BLAKE3 of the bytes has to be, if that is known."""

    index: int
    layer: int | None
    data: memoryview | None
    digest: bytes | None


class _Refusal(msgspec.Struct, frozen=True):
    """Why a chunk of ?mput was not stored."""

    code: str
    message: str
    detail: dict[str, Any] | None = None


class _PutItem(msgspec.Struct, frozen=True):
    """What ?mput answers of one chunk."""

    i: int
    status: int
    error: _Refusal | None = None
    existed: bool = False
    durability: str = ""
    etag: str = ""
    digest: bytes | None = None


class _PutAnswer(msgspec.Struct, frozen=True):
    """What ?mput answers."""

    items: list[_PutItem]


class HttpChunks:
    """One bucket's chunks. Thread-safe as its transport is. Bytes are handed on as they came: nothing is hashed here."""

    def __init__(self, transport: Transport, path: str) -> None:
        self._transport = transport
        self._path = path

    def get(
        self,
        key: str,
        *,
        layers: tuple[int, int] | None,
        pin: bytes | None,
        into: bytearray | memoryview | None,
        timeout_seconds: float | None,
        wants_digest: bool,
    ) -> tuple[memoryview, bytes | None] | None:
        """A chunk's bytes, or those of layers A to B, and the digest if it is wanted and they are the whole; None if it is not
        stored."""
        path = f"{self._path}/{key}"
        headers = {} if pin is None else {"x-kvobj-pin": pin.hex()}
        query = () if layers is None else (("layers", f"{layers[0]}-{layers[1]}"),)
        try:
            room = memoryview(b"") if into is None or query else memoryview(into).cast("B")
            if not room.readonly and len(room):
                lent = self._transport.fetch(path, headers, room, timeout_seconds, wants_digest=wants_digest)
                if isinstance(lent, Fetched):
                    return room[: lent.size_bytes], lent.digest
            else:
                lent = self._transport.open("GET", path, query=query, headers=headers, timeout_seconds=timeout_seconds)
            with lent as answer:
                view = room_for(into, _size_of(answer, _OK, *(_PARTIAL,) if query else ()))
                answer.readinto(view)
                digest = answer.headers.get("x-kvobj-digest") if wants_digest and answer.status == _OK else None
        except NoSuchKeyError:
            return None
        return view, _digest_of(digest)

    def get_stored(
        self,
        key: str,
        *,
        accept: Sequence[str],
        max_error: float | None,
        pin: bytes | None,
        timeout_seconds: float | None,
    ) -> StoredBytes | None:
        """A chunk in one of the codecs that are accepted, as the server holds it; None if it has none that will do."""
        headers = {"x-kvobj-accept": ", ".join(accepted(accept, max_error))}
        if pin is not None:
            headers["x-kvobj-pin"] = pin.hex()
        try:
            with self._transport.open(
                "GET", f"{self._path}/{key}", headers=headers, timeout_seconds=timeout_seconds
            ) as answer:
                view = room_for(None, _size_of(answer, _OK))
                answer.readinto(view)
                told = answer.headers
        except NoSuchKeyError:
            return None
        return StoredBytes(
            data=view,
            codec=told.get("x-kvobj-codec", RAW),
            lossy=told.get("x-kvobj-lossy"),
            digest=_digest_of(told.get("x-kvobj-digest")),
            tier=told.get("x-kvobj-tier", ""),
            lossy_digest=_digest_of(told.get("x-kvobj-lossy-digest")),
        )

    @property
    def timeout_seconds(self) -> float:
        """Of a call that names none."""
        return self._transport.timeout_seconds

    def put(
        self, namespace: Namespace, chunk: NewChunk, *, durability: str | None, timeout_seconds: float | None = None
    ) -> StoredChunk:
        """PUT one chunk."""
        key, parent = namespace.key_of(chunk.id), parent_text(namespace, chunk.parent)
        if parent is not None and not fits_header(parent):
            if namespace is DEFAULT and "/" in key:
                raise InvalidChunkIdError(
                    "no header carries the parent's name, and the key may be another namespace's: name the namespace, or use mput",
                    parent=parent,
                )
            return self._put_by_batch(namespace, chunk, parent, durability=durability, timeout_seconds=timeout_seconds)
        place = {
            "x-kvobj-namespace": None if namespace is DEFAULT else namespace.name,
            "x-kvobj-parent": parent,
            "x-kvobj-tokens": None if chunk.tokens is None else str(chunk.tokens),
            "x-kvobj-durability": durability,
        }
        headers = {header: value for header, value in place.items() if value is not None}
        body = [memoryview(chunk.data).cast("B")]
        path = f"{self._path}/{key}"
        with self._transport.open("PUT", path, headers=headers, body=body, timeout_seconds=timeout_seconds) as answer:
            if answer.status != _OK:  # a redirect, for one, has stored nothing
                raise UnavailableError("the answer is none to a chunk that was put", status=answer.status)
            answer.read()
            told = answer.headers
        if "x-kvobj-existed" not in told:
            raise InvalidRequestError(
                "the bucket is not of kind kv: what was put is an ordinary object of it", key=path
            )
        return StoredChunk(
            existed=told["x-kvobj-existed"] == "true",
            durability=told.get("x-kvobj-durability", ""),
            etag=told.get("etag", "").strip('"'),
            digest=_digest_of(told.get("x-kvobj-digest")),
        )

    def _put_by_batch(
        self,
        namespace: Namespace,
        chunk: NewChunk,
        parent: str,
        *,
        durability: str | None,
        timeout_seconds: float | None,
    ) -> StoredChunk:
        """As `put`, of a chunk whose parent no header carries: a batch has names in its body."""
        name = chunk.id.hex() if isinstance(chunk.id, bytes) else chunk.id
        named = replace(chunk, id=name, parent=parent)
        return only_outcome(self.mput(namespace.name, [named], durability=durability, timeout_seconds=timeout_seconds))

    def mget(
        self,
        names: Sequence[Name],
        *,
        namespace: Namespace,
        layers: tuple[int, int] | None = None,
        layer_order: bool = False,
        into: Rooms | None = None,
        timeout_seconds: float | None = None,
        head_seconds: float | None = None,
    ) -> Iterator[ArrivedItem]:
        """?mget: items as they come; the timeout is for each, and for the answer's head where `head_seconds` names no other.
        `UnavailableError` if the stream breaks off."""
        document: dict[str, object] = {"namespace": namespace.name, "ids": listed(names)}
        if layers is not None:
            document["layers"] = layers
        if layer_order:
            document["order"] = "layer"
        passes = 1 if not layer_order else None if layers is None else layers[1] - layers[0] + 1
        item_seconds = self._transport.timeout_seconds if timeout_seconds is None else timeout_seconds
        with self._transport.open(
            "POST",
            self._path,
            query=(("mget", ""),),
            headers={"content-type": MSGPACK},
            body=msgspec.msgpack.encode(document),
            timeout_seconds=timeout_seconds if head_seconds is None else head_seconds,
        ) as answer:
            count = 0
            while True:
                answer.allow(item_seconds)
                header = parse_header(_exactly(answer, header_length(_exactly(answer, LENGTH_BYTES))))
                if header.end:
                    if header.items != count or not _is_all(count, len(names), passes):
                        raise UnavailableError(
                            "the stream of chunks is not whole", items=header.items, came=count, asked=len(names)
                        )
                    answer.read()
                    return
                if header.i != count % max(1, len(names)) or (passes == 1 and count >= len(names)):
                    raise UnavailableError("the stream has another chunk than is its turn", index=header.i, came=count)
                count += 1
                if header.status != _OK:
                    yield ArrivedItem(header.i, header.layer, None, None)
                    continue
                room = None if into is None else into(header.i, header.layer, header.size_bytes)
                view = room_for(room, header.size_bytes)
                answer.readinto(view)
                yield ArrivedItem(header.i, header.layer, view, header.digest)

    def mput(
        self,
        namespace: str,
        chunks: Sequence[NewChunk],
        *,
        durability: str | None,
        timeout_seconds: float | None = None,
    ) -> list[StoredChunk | KvobjError]:
        """?mput."""
        headers = {"content-type": STREAM_TYPE, "accept": MSGPACK}
        if durability is not None:
            headers["x-kvobj-durability"] = durability
        body = chunk_stream(namespace, chunks)
        query = (("mput", ""),)
        with self._transport.open(
            "POST", self._path, query=query, headers=headers, body=body, timeout_seconds=timeout_seconds
        ) as answer:
            told = read_answer(answer.read(), _PutAnswer)
        if [item.i for item in told.items] != list(range(len(chunks))):
            raise UnavailableError("the answer is about other chunks", items=len(told.items), chunks=len(chunks))
        return [_stored(item) for item in told.items]


def only_outcome(outcomes: list[StoredChunk | KvobjError]) -> StoredChunk:
    """What became of the only chunk of a batch, taken out of the list; raises its error. The traceback has this frame and the
    callers': what is raised must be in none of them, or it keeps the chunk's memory until the interpreter looks for cycles."""
    outcome = outcomes.pop()
    try:
        if isinstance(outcome, KvobjError):
            raise outcome
        return outcome
    finally:
        del outcome


def listed(names: Sequence[Name]) -> bytes | list[str]:
    """Names as msgpack has them: raw ids end to end, or strings."""
    if names and isinstance(names[0], bytes):
        ids = [name for name in names if isinstance(name, bytes)]
        if len(ids) != len(names) or any(len(each) != CHUNK_ID_BYTES for each in ids):
            raise InvalidRequestError("a list has chunk ids of 32 bytes, or strings")
        return b"".join(ids)
    keys = [name for name in names if isinstance(name, str)]
    if len(keys) != len(names):
        raise InvalidRequestError("a list has chunk ids of 32 bytes, or strings")
    for key in keys:
        check_writable(key)
    return keys


def new_room(size_bytes: int) -> memoryview:
    """Memory for what the server says is to come. `UnavailableError` where that is more than there can be."""
    try:
        return memoryview(bytearray(size_bytes))
    except (MemoryError, OverflowError) as error:
        raise UnavailableError("no memory for so many bytes", size_bytes=size_bytes) from error


def room_for(into: bytearray | memoryview | None, size_bytes: int) -> memoryview:
    """The part of the room that a chunk fills, or new memory (`new_room`). `InvalidRequestError` for a room that is too small,
    `TypeError` for one that may not be written."""
    if into is None:
        return new_room(size_bytes)
    view = memoryview(into).cast("B")
    if view.readonly:
        raise TypeError("the room for a chunk is read-only: give a bytearray, or another buffer that may be written")
    if len(view) < size_bytes:
        raise InvalidRequestError(
            "the chunk is larger than the room for it", size_bytes=size_bytes, room_bytes=len(view)
        )
    return view[:size_bytes]


def _size_of(answer: Incoming, *statuses: int) -> int:
    """How many bytes of a chunk an answer of one of these statuses has. `UnavailableError` for another, a redirect for one, for a
    page, and where it does not tell: then this is not the server it was taken for."""
    told = answer.headers
    length = told.get("content-length")
    if length is None or answer.status not in statuses or REQUEST_ID not in told:
        raise UnavailableError(
            "the answer is no chunk", status=answer.status, length=length, content_type=told.get("content-type")
        )
    return int(length)


def _digest_of(told: str | None) -> bytes | None:
    """A digest as a header has it. `UnavailableError` for what is none: then this is not the server it was taken for."""
    try:
        return bytes.fromhex(told) if told else None
    except ValueError as error:
        raise UnavailableError("the answer's digest is none", digest=told) from error


def _stored(item: _PutItem) -> StoredChunk | KvobjError:
    if item.error is not None:
        return error_of(item.status, item.error.code, item.error.message, item.error.detail or {})
    if item.status != _OK:
        return UnavailableError("the answer does not say what became of a chunk", status=item.status)
    return StoredChunk(existed=item.existed, durability=item.durability, etag=item.etag, digest=item.digest)


def _is_all(came: int, asked: int, passes: int | None) -> bool:
    """Whether so many items are all that were asked for; `passes`: how often each, None where only the server knows."""
    if passes is not None:
        return came == asked * passes
    return came % asked == 0 and came >= asked if asked else came == 0


def _exactly(answer: Incoming, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    answer.readinto(memoryview(buffer))
    return bytes(buffer)
