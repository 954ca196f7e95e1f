"""Chunk bytes, whichever way they go: by shared memory where the server and the client are on one host and may, else over HTTP.

The two ways answer alike. What the same-host path cannot do, or does not do at this moment, goes over HTTP within the same call,
so a caller sees nothing of either but the time. Bytes are hashed where their digest is known and `verify` is set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

from blake3 import blake3

from kvobj.client.call_scope import current_scope
from kvobj.client.http_chunks import HttpChunks, Rooms, only_outcome, room_for
from kvobj.client.kv_values import (
    DEFAULT,
    RAW,
    Name,
    Namespace,
    NewChunk,
    ReadChunk,
    StoredBytes,
    StoredChunk,
    parent_text,
)
from kvobj.client.same_host import Held, SameHost
from kvobj.client.views import ChunkView
from kvobj.errors import CorruptionError, InvalidChunkIdError, KvobjError, UnavailableError
from kvobj.same_host.messages import KEYS_MAX

OPENED_AT_ONCE: Final = 64
"""Chunks of a stream that are pinned together."""

Error = TypeVar("Error", bound=KvobjError)

_Layers = tuple[int, int] | None


class PartlyReadError(UnavailableError):
    """The server is not there, or not in time, for the rest of a call's chunks: `sizes` are as `KvClient.get_chunks` has them, of
    those that had come."""

    def __init__(self, error: UnavailableError, sizes: list[int | None]) -> None:
        super().__init__(error.message, **error.data)
        self.sizes = sizes


class ChunkBytes:
    """See the module's text. Thread-safe."""

    def __init__(self, http: HttpChunks, same_host: SameHost, *, verify: bool, verify_same_host: bool) -> None:
        self._http = http
        self._same_host = same_host
        self._verify = verify
        self._verify_same_host = verify_same_host

    # -- reading -------------------------------------------------------------------------------------------------
    def view(
        self, name: Name, namespace: Namespace, *, pin: bytes | None, timeout_seconds: float | None = None
    ) -> ChunkView | None:
        """See `KvClient.view_chunk`."""
        key = namespace.key_of(name)
        until = self._until(timeout_seconds)
        held = self._held([key], _pins(pin), timeout_seconds)
        if held is not None:
            if held.size_of(0) is None:
                return None
            view = _view_of(held, 0)
            if view is not None:
                return view
        left = until - time.monotonic()
        found = self._http.get(key, layers=None, pin=pin, into=None, timeout_seconds=left, wants_digest=True)
        if found is None:
            return None
        data, digest = found
        self._check(data, digest)
        return ChunkView(data, digest=digest)

    def view_many(
        self,
        names: Sequence[Name],
        namespace: Namespace,
        *,
        pins: Sequence[bytes | None],
        timeout_seconds: float | None,
    ) -> list[ChunkView | None]:
        """See `KvClient.view_chunks`."""
        keys = [namespace.key_of(name) for name in names]
        if len(pins) not in {0, 1, len(keys)}:
            raise ValueError(
                f"view_chunks has no pin, one for all names, or one for each: {len(keys)} names, {len(pins)} pins"
            )
        views: list[ChunkView | None] = [None] * len(keys)
        try:
            until = self._until(timeout_seconds)
            left: list[int] = []
            for start in range(0, len(keys), KEYS_MAX):
                until = self._until(timeout_seconds)  # of each part
                some = range(start, min(start + KEYS_MAX, len(keys)))
                held = self._held(keys[start : some.stop], _of_part(pins, some), timeout_seconds)
                if held is None:
                    left += range(start, len(keys))
                    break
                for at, place in enumerate(some):
                    if held.size_of(at) is not None:
                        views[place] = _view_of(held, at)
                        left += [] if views[place] is not None else [place]
            for place, data, digest in self._rest(
                left, names, namespace, pins, until, lambda _: None, timeout_seconds, wants_digest=True
            ):
                views[place] = ChunkView(data, digest=digest)
        except BaseException:
            for view in views:
                if view is not None:
                    view.release()
            raise
        return views

    def _held(self, keys: list[str], pins: Sequence[bytes | None], timeout_seconds: float | None) -> Held | None:
        """Where the chunks lie, of what was opened ahead if all of it was; None: ask over HTTP."""
        held = None if pins else self._same_host.take_ahead(keys)
        return held or self._same_host.open(keys, pins=pins, timeout_seconds=timeout_seconds)

    def get(
        self,
        name: Name,
        namespace: Namespace,
        *,
        layers: _Layers,
        pin: bytes | None,
        into: bytearray | memoryview | None,
        timeout_seconds: float | None,
    ) -> memoryview | None:
        """See `KvClient.get_chunk`."""
        key = namespace.key_of(name)
        if self._same_host.is_wanted:
            until = self._until(timeout_seconds)
            held = self._same_host.open([key], layers=layers, pins=_pins(pin), timeout_seconds=timeout_seconds)
            if held is not None:
                if held.size_of(0) is None:
                    return None
                view = self._copied(held, 0, into)
                if view is not None:
                    return view
            timeout_seconds = until - time.monotonic()
        found = self._http.get(
            key, layers=layers, pin=pin, into=into, timeout_seconds=timeout_seconds, wants_digest=self._verify
        )
        if found is None:
            return None
        self._check(*found)
        return found[0]

    def get_stored(
        self,
        name: Name,
        namespace: Namespace,
        *,
        accept: Sequence[str],
        max_error: float | None,
        pin: bytes | None,
        timeout_seconds: float | None,
    ) -> StoredBytes | None:
        """See `KvClient.get_stored`."""
        stored = self._http.get_stored(
            namespace.key_of(name), accept=accept, max_error=max_error, pin=pin, timeout_seconds=timeout_seconds
        )
        if stored is not None and stored.codec == RAW:
            self._check(stored.data, stored.plain_digest)
        return stored

    def get_many(
        self,
        names: Sequence[Name],
        rooms: Sequence[memoryview],
        namespace: Namespace,
        *,
        pin: bytes | None,
        timeout_seconds: float | None,
    ) -> list[int | None]:
        """See `KvClient.get_chunks`. `PartlyReadError` where that has `UnavailableError`."""
        if len(names) != len(rooms):
            raise ValueError(f"get_chunks has one room for each name: {len(names)} names, {len(rooms)} rooms")
        sizes: list[int | None] = [None] * len(names)
        try:
            self._get_many(names, rooms, namespace, sizes, pin=pin, timeout_seconds=timeout_seconds)
        except UnavailableError as error:
            raise PartlyReadError(error, sizes) from error
        return sizes

    def _get_many(
        self,
        names: Sequence[Name],
        rooms: Sequence[memoryview],
        namespace: Namespace,
        sizes: list[int | None],
        *,
        pin: bytes | None,
        timeout_seconds: float | None,
    ) -> None:
        left = list(range(len(names)))
        until = self._until(timeout_seconds)
        while left:
            until = self._until(timeout_seconds)  # of each part
            some, left = left[:KEYS_MAX], left[KEYS_MAX:]
            keys = [namespace.key_of(names[index]) for index in some]
            held = self._held(keys, _pins(pin), timeout_seconds)
            if held is None:
                left = some + left
                break
            behind = self._fill_many(held, some, rooms, sizes)
            if len(behind) == len(some):
                left = some + left
                break
            # What the store had no room to pin is asked for again, now that the others are released.
            left = behind + left
        for place, data, _ in self._rest(
            left,
            names,
            namespace,
            _pins(pin),
            until,
            lambda place: rooms[place],
            timeout_seconds,
            wants_digest=self._verify,
        ):
            sizes[place] = len(data)

    def open_ahead(self, names: Sequence[Name], namespace: Namespace, *, seconds: float) -> None:
        """See `KvClient.open_ahead`."""
        self._same_host.open_ahead(list(_names_of(namespace, names)), seconds=seconds)

    def drop_ahead(self, names: Sequence[Name], namespace: Namespace) -> None:
        """See `KvClient.drop_ahead`."""
        self._same_host.drop_ahead(list(_names_of(namespace, names)))

    def _fill_many(
        self, held: Held, places: Sequence[int], rooms: Sequence[memoryview], sizes: list[int | None]
    ) -> list[int]:
        """Copy what is held, after it is known that all of it fits; the places of what has to come another way."""
        behind: list[int] = []
        try:
            found: list[tuple[int, int, memoryview]] = []
            for at, place in enumerate(places):
                size_bytes = held.size_of(at)
                if size_bytes is None:
                    continue
                view = room_for(rooms[place], size_bytes)
                if held.extents[at] is None:
                    behind.append(place)
                else:
                    found.append((at, place, view))
            if held.copy_into(*[(at, view) for at, _, view in found]):
                for at, place, view in found:
                    self._check_copy(view, held.digest(at))
                    sizes[place] = len(view)
            else:
                behind += [place for _, place, _ in found]
        finally:
            held.release()
        return behind

    def _rest(  # noqa: PLR0917 - of one file
        self,
        places: Sequence[int],
        names: Sequence[Name],
        namespace: Namespace,
        pins: Sequence[bytes | None],
        until: float,
        room_of: Callable[[int], memoryview | None],
        timeout_seconds: float | None,
        *,
        wants_digest: bool,
    ) -> Iterator[tuple[int, memoryview, bytes | None]]:
        """Chunks over HTTP, in the rooms or in memory of their own, checked; with each which of `names` it is. `until`: when the
        first answer is due, of `time.monotonic`; those behind it have the timeout each."""
        if not places:
            return
        first: float | None = until - time.monotonic()
        singly = list(places)
        if not pins or len(places) > 1:
            # By streams, which read ahead. A stream reads no pins: what it has not, as what a DELETE has hidden, comes one by one.
            singly = []
            for start in range(0, len(places), KEYS_MAX):
                some = places[start : start + KEYS_MAX]

                def room(index: int, _layer: int | None, _size: int, some: Sequence[int] = some) -> memoryview | None:
                    return room_of(some[index])

                wanted = [names[place] for place in some]
                for item in self._http.mget(
                    wanted, namespace=namespace, into=room, timeout_seconds=timeout_seconds, head_seconds=first
                ):
                    if item.data is not None:
                        self._check(item.data, item.digest)
                        yield some[item.index], item.data, item.digest
                    elif pins:
                        singly.append(some[item.index])
                first = None
        for place in singly:
            found = self._http.get(
                namespace.key_of(names[place]),
                layers=None,
                pin=pins[0] if len(pins) == 1 else pins[place],
                into=room_of(place),
                timeout_seconds=timeout_seconds if first is None else first,
                wants_digest=wants_digest,
            )
            first = None
            if found is not None:
                self._check(*found)
                yield place, *found

    def stream(
        self,
        names: Sequence[Name],
        namespace: Namespace,
        *,
        layers: _Layers,
        layer_order: bool,
        into: Rooms | None,
        timeout_seconds: float | None,
    ) -> Iterator[ReadChunk]:
        """See `KvClient.mget`."""
        start = 0
        head_seconds = None
        while start < len(names) and not layer_order:
            until = self._until(timeout_seconds)
            some = names[start : start + OPENED_AT_ONCE]
            keys = [namespace.key_of(name) for name in some]
            held = self._same_host.open(keys, namespace=namespace.name, layers=layers, timeout_seconds=timeout_seconds)
            if held is None:
                head_seconds = until - time.monotonic()
                break
            yield from self._streamed(held, start, some, namespace, layers, into, timeout_seconds)
            start += len(some)
        if start == len(names) and start:
            return

        def room(index: int, layer: int | None, size_bytes: int) -> memoryview | None:
            return None if into is None else into(start + index, layer, size_bytes)

        for item in self._http.mget(
            names[start:],
            namespace=namespace,
            layers=layers,
            layer_order=layer_order,
            into=room,
            timeout_seconds=timeout_seconds,
            head_seconds=head_seconds,
        ):
            if item.data is not None:
                self._check(item.data, item.digest)
            yield ReadChunk(start + item.index, item.layer, item.data)

    def _streamed(  # noqa: PLR0917 - one caller
        self,
        held: Held,
        start: int,
        names: Sequence[Name],
        namespace: Namespace,
        layers: _Layers,
        into: Rooms | None,
        timeout_seconds: float | None,
    ) -> Iterator[ReadChunk]:
        behind = [at for at in range(len(names)) if held.extents[at] is None and held.size_of(at) is not None]

        def room_behind(index: int, _layer: int | None, size_bytes: int) -> memoryview | None:
            return None if into is None else into(start + behind[index], None, size_bytes)

        # All by one stream, which reads ahead: one at a time each would be fetched only once the one before it has come.
        rest = (
            self._http.mget(
                [names[at] for at in behind],
                namespace=namespace,
                layers=layers,
                into=room_behind,
                timeout_seconds=timeout_seconds,
            )
            if behind
            else iter(())
        )
        released = 0
        try:
            for at, name in enumerate(names):
                size_bytes = held.size_of(at)
                if size_bytes is None:
                    yield ReadChunk(start + at, None, None)
                    continue
                if held.extents[at] is None:
                    item = next(rest)
                    if item.data is not None:
                        self._check(item.data, item.digest)
                    yield ReadChunk(start + at, None, item.data)
                    continue
                room = None if into is None else into(start + at, None, size_bytes)
                released = at + 1
                view = self._copied(held, at, room)
                if view is None:
                    view = self.get(
                        name, namespace, layers=layers, pin=None, into=room, timeout_seconds=timeout_seconds
                    )
                yield ReadChunk(start + at, None, view)
            next(rest, None)  # to its end: the connection is kept
        finally:
            if released < len(names):
                held.release(*range(released, len(names)))

    def _copied(self, held: Held, index: int, into: bytearray | memoryview | None) -> memoryview | None:
        """A held chunk in the room, or in new memory, and released; None where it has to come another way."""
        extent = held.extents[index]
        if extent is None:
            return None
        try:
            view = room_for(into, extent.size_bytes)
            if not held.copy_into((index, view)):
                return None
        finally:
            held.release(index)
        self._check_copy(view, extent.digest)
        return view

    def _until(self, timeout_seconds: float | None) -> float:
        """The deadline of a call that begins now, both ways together."""
        deadline = time.monotonic() + (self._http.timeout_seconds if timeout_seconds is None else timeout_seconds)
        scope = current_scope()
        return deadline if scope is None else min(deadline, scope.deadline)

    def _check(self, view: memoryview, digest: bytes | None) -> None:
        if self._verify:
            _check_digest(view, digest)

    def _check_copy(self, view: memoryview, digest: bytes | None) -> None:
        if self._verify_same_host:
            _check_digest(view, digest)

    # -- writing -------------------------------------------------------------------------------------------------
    def put(
        self, namespace: Namespace, chunk: NewChunk, *, durability: str | None, timeout_seconds: float | None
    ) -> StoredChunk:
        """See `KvClient.put_chunk`."""
        key, parent = namespace.key_of(chunk.id), parent_text(namespace, chunk.parent)
        until = self._until(timeout_seconds)
        # Of a key without a namespace the server finds it by the key's front, which a batch does not.
        if namespace is not DEFAULT or "/" not in key:
            renamed = replace(chunk, id=_text(chunk.id), parent=parent)
            stored = self._same_host.store(namespace.name, [renamed], durability=durability, seconds=timeout_seconds)
            if stored is not None:
                return only_outcome(stored)
        return self._http.put(namespace, chunk, durability=durability, timeout_seconds=until - time.monotonic())

    def put_many(
        self,
        namespace: Namespace,
        chunks: Sequence[NewChunk],
        *,
        durability: str | None,
        timeout_seconds: float | None,
    ) -> list[StoredChunk | KvobjError]:
        """See `KvClient.mput`."""
        namespace.check_names(chunks)
        until = self._until(timeout_seconds)
        stored = self._same_host.store(namespace.name, chunks, durability=durability, seconds=timeout_seconds)
        if stored is not None:
            return stored
        left = until - time.monotonic()
        return self._http.mput(namespace.name, chunks, durability=durability, timeout_seconds=left)

    def put_batches(
        self, namespace: Namespace, batches: Sequence[Sequence[NewChunk]], *, durability: str | None
    ) -> list[list[StoredChunk | KvobjError] | KvobjError]:
        """See `KvClient.mput_batches`."""
        refused = [_refusal(namespace, chunks) for chunks in batches]
        sound = [chunks for chunks, refusal in zip(batches, refused, strict=True) if refusal is None]
        told = iter(self._put_sound(namespace, sound, durability=durability))
        return [next(told) if refusal is None else refusal for refusal in refused]

    def _put_sound(
        self, namespace: Namespace, batches: Sequence[Sequence[NewChunk]], *, durability: str | None
    ) -> list[list[StoredChunk | KvobjError] | KvobjError]:
        """`put_batches` of chunks whose names are known to be some."""
        answers: list[list[StoredChunk | KvobjError] | KvobjError] = []
        away: KvobjError | None = None
        until = self._until(None)
        stored = self._same_host.store_batches(namespace.name, batches, durability=durability)
        left = None
        if not any(stored):  # what was waited for so far was not the copying of other batches
            left = until - time.monotonic()
        for chunks, told in zip(batches, stored, strict=True):
            known = away if told is None else told
            if known is not None:
                answers.append(known)
                continue
            try:
                answers.append(self._http.mput(namespace.name, chunks, durability=durability, timeout_seconds=left))
                left = None
            except KvobjError as error:
                answers.append(_as_answer(error))
                away = error if isinstance(error, UnavailableError) else None
        return answers


def _view_of(held: Held, index: int) -> ChunkView | None:
    """A held chunk, which its view releases; None where it has to come another way."""
    extent, memory = held.extents[index], held.memory(index)
    if extent is None or memory is None:
        held.release(index)
        return None
    release = partial(held.release, index)
    return ChunkView(memory, digest=extent.digest, tier=extent.tier, lane=held.lane, on_release=release)


def _of_part(pins: Sequence[bytes | None], places: range) -> Sequence[bytes | None]:
    """The pins of some of the chunks, where each has its own."""
    return pins if len(pins) < 2 else pins[places.start : places.stop]  # noqa: PLR2004 - none, or one for all


def _check_digest(view: memoryview, digest: bytes | None) -> None:
    if digest is not None and blake3(view).digest() != digest:
        raise CorruptionError("the bytes that came are not those that were stored", size_bytes=len(view))


def _refusal(namespace: Namespace, chunks: Sequence[NewChunk]) -> InvalidChunkIdError | None:
    """Why a batch is not sent; None: it is."""
    try:
        namespace.check_names(chunks)
    except InvalidChunkIdError as error:
        return _as_answer(error)
    return None


def _as_answer(error: Error) -> Error:
    """An error that is returned. Its traceback has the frames of all callers, also of who has the answers: it would keep itself,
    and the memory that was to be stored, until the interpreter looks for cycles. So would those of the errors behind it."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _names_of(namespace: Namespace, names: Sequence[Name]) -> Iterator[str]:
    """The keys of those that are names."""
    for name in names:
        with suppress(InvalidChunkIdError):
            yield namespace.key_of(name)


def _pins(pin: bytes | None) -> tuple[bytes | None, ...]:
    return () if pin is None else (pin,)


def _text(name: Name) -> str:
    return name.hex() if isinstance(name, bytes) else name
