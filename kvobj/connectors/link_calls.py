"""The calls of a link, as they go out: client, namespace, session and what it holds, split to the API's bounds.

Raises the typed errors of `kvobj.client`; `link` turns them into misses. What a call has done before it raised stands in the list
that it was given.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from kvobj.client.call_scope import current_scope, ends_by
from kvobj.client.connection import trusting
from kvobj.client.credentials import Credentials
from kvobj.client.kv import KvClient
from kvobj.client.kv_values import DEFAULT_NAME, Name, Namespace, NewChunk
from kvobj.client.loans import Places
from kvobj.client.retry import RetryRule
from kvobj.client.session import Pin, Session
from kvobj.connectors.bucket_calls import PAGE_KEYS_MAX, BucketCalls
from kvobj.connectors.helpers import Helpers
from kvobj.connectors.holds import Holds, let_go, live_as_far_as_it_fits, pin_what_fits
from kvobj.connectors.link_settings import SECONDS_PER_BYTE, LinkSettings
from kvobj.connectors.pieces import MOVED_AT_ONCE, cut
from kvobj.connectors.reading import ChunkReader, Wanted
from kvobj.connectors.storing import ChunkWriter, Outcome
from kvobj.connectors.tally import Tally
from kvobj.connectors.used_namespace import UsedNamespace
from kvobj.errors import (
    BusyError,
    CorruptionError,
    InvalidRequestError,
    KvobjError,
    NoSuchNamespaceError,
    PinLimitExceededError,
    UnavailableError,
)

T = TypeVar("T")

MATCHED_AT_ONCE: Final = 65_536
PINNED_AT_ONCE: Final = 1024
LOADED_BYTES_AT_ONCE: Final = 256 * 1024 * 1024
STORE_THREADS: Final = 2
"""How many threads of an engine's store at once, where it does not say."""
CHECKED_SECONDS: Final = 1.0
"""A server that answers nothing else for so long is not there. Of a call's time that is kept back for asking, but half of it at
most."""
_LAST_CHARACTER: Final = chr(sys.maxunicode)
_RETRY: Final = RetryRule(tries=2, burst=4.0)
"""One more try for a connection that the server closed; a longer wait is the link's to make, without an engine waiting in it."""


class LinkCalls:
    """The calls that one process makes for a link, and what they stand on. Thread-safe."""

    def __init__(
        self,
        settings: LinkSettings,
        tally: Tally,
        *,
        note_refusal: Callable[[KvobjError], None],
        store_threads: int = STORE_THREADS,
    ) -> None:
        """`note_refusal` is told why a chunk was not stored where others of its batch may have been. `store_threads`: see
        `StoreLink`."""
        credentials = Credentials(settings.access_key, settings.secret_key)
        self._settings = settings
        self._tally = tally
        self._client = KvClient(
            settings.endpoint,
            credentials,
            settings.bucket,
            connections=settings.connections,
            timeout_seconds=settings.timeout_seconds,
            retry=_RETRY,
            verify=settings.verify,
            same_host=settings.same_host,
            verify_same_host=settings.verify_same_host,
            region=settings.region,
            ca_bundle=settings.ca_bundle,
        )
        self._reader = ChunkReader(self._client, tally)
        self._bucket = BucketCalls(
            settings.endpoint,
            credentials,
            settings.bucket,
            region=settings.region,
            timeout_seconds=settings.timeout_seconds,
            retry=_RETRY,
            tls=None if settings.ca_bundle is None else trusting(settings.ca_bundle),
        )
        self._namespace = UsedNamespace(self._client, settings)
        self._session: Session | None = None
        self._opening = Places(1)
        self._closing = threading.Lock()
        self._is_closed = False
        self._holds = Holds()
        self._threads = min(settings.threads, os.cpu_count() or 1)
        helpers = 2 * (self._threads - 1)
        self._helpers = Helpers(helpers)
        # A store that waits for room keeps its connection until the deadline. If stores could have all of them, a load would wait
        # behind them for as long: those that store and their helpers have half.
        self._store_helpers = Helpers(max(0, min(helpers, settings.connections // 2 - store_threads)))
        self._writer = ChunkWriter(
            self._client,
            tally,
            self._store_helpers,
            threads=self._threads,
            durability=settings.durability,
            note_refusal=note_refusal,
        )

    @property
    def held(self) -> int:
        """Names that are held, each as often as it is."""
        return len(self._holds)

    @property
    def is_same_host(self) -> bool:
        """Whether chunks come through shared memory now; finds out, if that is due, and may wait for that."""
        return self._client.is_same_host

    @property
    def is_same_host_now(self) -> bool:
        """The same as far as it is known: waits for nothing."""
        return self._client.is_same_host_now

    @property
    def same_host_reason(self) -> str:
        """See `KvClient.same_host_reason`."""
        return self._client.same_host_reason

    # -- what is stored ------------------------------------------------------------------------------------------
    def hold(self, names: Sequence[Name]) -> list[bool]:
        """See `StoreLink.hold`. Where it raises nothing is held."""
        pins = self._pinned(names)
        self._keep(names, pins)
        return [pin is not None for pin in pins] + [False] * (len(names) - len(pins))

    def hold_or_find(self, names: Sequence[Name]) -> list[tuple[bool, bool]]:
        """See `StoreLink.hold_or_find`. Where it raises nothing is held."""
        pins = self._pinned(names)
        try:
            rest = names[len(pins) :]
            found = self._present(self._namespace.get(), rest, has_room=False) if rest else []
        except BaseException:
            let_go(pins)
            raise
        self._keep(names, pins)
        return [(pin is not None, pin is not None) for pin in pins] + [(each, False) for each in found]

    def _keep(self, names: Sequence[Name], pins: Sequence[Pin | None]) -> None:
        for name, pin in zip(names, pins, strict=False):  # of the first names
            if pin is not None:
                self._holds.add(pin, (name,))

    def hold_run(self, names: Sequence[Name]) -> int:
        """See `StoreLink.hold_run`."""
        space, session = self._namespace.get(), self._own_session()
        asked = names[:MATCHED_AT_ONCE]
        while asked:
            try:
                found = session.match(namespace=space, ids=asked)
            except PinLimitExceededError:
                asked = asked[: len(asked) // 2]
                continue
            if found.pin is None:
                return 0
            self._holds.add(found.pin, asked[: found.answer.matched])
            return found.answer.matched
        return 0

    def present(self, names: Sequence[Name]) -> list[bool]:
        """See `StoreLink.present`. What the leading run does not tell is pinned for a moment, which asks for many in one call, and
        in the middle of a chain too. Where the session has no room for that, one is opened that has."""
        return self._present(self._namespace.get(), names, has_room=True)

    def _present(self, space: Namespace, names: Sequence[Name], *, has_room: bool) -> list[bool]:
        """See `present`. `has_room`: whether the session may have some."""
        found = [True] * self._client.match(namespace=space, ids=names[:MATCHED_AT_ONCE]).matched
        if has_room and len(found) < len(names):
            found += live_as_far_as_it_fits(self._own_session(), space, names[len(found) :], PINNED_AT_ONCE)
        if len(found) < len(names):
            with self._new_session(is_automatic=False) as session:
                found += live_as_far_as_it_fits(session, space, names[len(found) :], PINNED_AT_ONCE)
        return found + [False] * (len(names) - len(found))

    def run(self, names: Sequence[Name]) -> int:
        """See `StoreLink.run`."""
        return self._client.match(namespace=self._namespace.get(), ids=names[:MATCHED_AT_ONCE]).matched

    def release(self, names: Sequence[Name]) -> None:
        """See `StoreLink.release`."""
        let_go(self._holds.take(names))
        space = self._namespace.known
        if space is not None:
            left = [name for name in names if self._holds.pin_of(name) is None]
            self._client.drop_ahead(left, namespace=space)

    def open_ahead(self, names: Sequence[Name]) -> None:
        """See `StoreLink.open_ahead`."""
        session = self._own_session()
        # Who stands still for longer than a lease finds nothing: what is locked is then what can be pinned again.
        self._client.open_ahead(names, namespace=self._namespace.get(), seconds=session.renew_seconds)
        gone = [name for name in names if self._holds.pin_of(name) is None]  # let go of meanwhile
        self._client.drop_ahead(gone, namespace=self._namespace.get())

    # -- chunks --------------------------------------------------------------------------------------------------
    def load(
        self, names: Sequence[Name], rooms: Sequence[memoryview], found: list[memoryview | None], *, exact: bool
    ) -> None:
        """See `StoreLink.load` and `StoreLink.fetch`; sets `found[i]` once all bytes of that chunk are right: to its room, or
        (unless `exact`) to memory of its own where it is of another size."""
        if len(rooms) != len(names) or any(room.readonly or not room.c_contiguous for room in rooms):
            raise InvalidRequestError("each chunk needs a room of its own, writable and in one piece")
        views = [room.cast("B") for room in rooms]
        deadline = self._deadline(sum(map(len, views)))
        with ends_by(deadline):
            self._load(names, rooms, views, found, deadline, exact=exact)

    def _load(
        self,
        names: Sequence[Name],
        rooms: Sequence[memoryview],
        views: Sequence[memoryview],
        found: list[memoryview | None],
        deadline: float,
        *,
        exact: bool,
    ) -> None:
        sizes = [len(view) for view in views]

        def came(index: int, data: memoryview) -> None:
            if len(data) == sizes[index]:
                found[index] = rooms[index]
            elif not exact:
                found[index] = data

        if self._session is not None and not self._session.is_valid:
            self._client.drop_ahead(names, namespace=self._namespace.get())
        wanted = Wanted(names, self._namespace.get(), views, came, deadline, is_exact=exact)
        for start, stop in cut(sizes, LOADED_BYTES_AT_ONCE, MOVED_AT_ONCE):
            if self.is_same_host:  # one call, and the client copies by several threads
                self._reader.read(wanted, start, stop)
            else:
                move = partial(self._reader.read, wanted)
                self._helpers.divide(sizes, start, stop, move, threads=self._threads)
        self._load_pinned(names, views, found, came, exact=exact)

    def _load_pinned(
        self,
        names: Sequence[Name],
        views: Sequence[memoryview],
        found: Sequence[memoryview | None],
        came: Callable[[int, memoryview], None],
        *,
        exact: bool,
    ) -> None:
        for index, data in enumerate(found):
            pin = None if data is not None else self._holds.pin_of(names[index])
            if pin is not None:
                read = self._read_pinned(pin, names[index], views[index] if exact else None)
                if read is not None and not exact and len(read) == len(views[index]):
                    views[index][:] = read
                if read is not None:
                    came(index, read)

    def read(self, names: Sequence[Name], found: list[memoryview | None]) -> None:
        """See `StoreLink.read`; sets `found[i]` once all bytes of that chunk are right."""
        pieces = -(-len(names) // MOVED_AT_ONCE)
        ends = self._deadline(pieces * LOADED_BYTES_AT_ONCE)
        for start in range(0, len(names), MOVED_AT_ONCE):
            deadline = min(ends, self._deadline(LOADED_BYTES_AT_ONCE))
            with ends_by(deadline):
                self._read(names, found, start, min(len(names), start + MOVED_AT_ONCE), deadline)

    def _read(
        self, names: Sequence[Name], found: list[memoryview | None], start: int, stop: int, deadline: float
    ) -> None:
        wanted = Wanted(names, self._namespace.get(), None, found.__setitem__, deadline)
        self._reader.read(wanted, start, stop)
        for index in range(start, stop):
            pin = None if found[index] is not None else self._holds.pin_of(names[index])
            if pin is not None:
                found[index] = self._read_pinned(pin, names[index], None)

    def store(self, chunks: Sequence[NewChunk], outcomes: list[Outcome]) -> None:
        """See `StoreLink.put`; sets `outcomes[i]` once that chunk is stored. `NotGrantedError` for who may only read."""
        sizes = [memoryview(chunk.data).nbytes for chunk in chunks]
        with ends_by(self._deadline(sum(sizes))):
            self._namespace.check_may_write()
            space = self._namespace.get()
            self._namespace.granted(lambda: self._writer.store(space, chunks, sizes, outcomes))

    def delete(self, names: Sequence[Name]) -> bool:
        """See `StoreLink.delete`. `NotGrantedError` as `store`; `BusyError` where the call's time ended before all were asked
        for."""
        space = self._namespace.get()
        keys = [space.key_of(name) for name in names]
        self._client.drop_ahead(names, namespace=space)
        for start in range(0, len(keys), PAGE_KEYS_MAX):
            remove = partial(self._bucket.delete, keys[start : start + PAGE_KEYS_MAX])
            self._paged(remove, is_first=start == 0)
        return True

    # -- what the namespace has ----------------------------------------------------------------------------------
    def names(self, *, after: str, limit: int, key_prefix: str) -> list[tuple[str, int]]:
        """See `StoreLink.page`. `NotGrantedError` for who may use the namespace, and not list the bucket; `BusyError` where the
        call's time ended before there was a whole page."""
        space = self._namespace.get()
        if space.has_chains:
            raise InvalidRequestError("keys of a namespace with kvobj's ids do not tell their namespace")
        base = "" if space.name == DEFAULT_NAME else f"{space.name}/"
        foreign = () if base else tuple(f"{each.name}/" for each in self._client.namespaces())
        found: list[tuple[str, int]] = []
        is_first, behind = True, base + after if after else ""
        while len(found) < limit:
            asked = min(limit - len(found), PAGE_KEYS_MAX)
            page = self._paged(
                partial(self._bucket.page, prefix=base + key_prefix, after=behind, limit=asked), is_first=is_first
            )
            found += [(key[len(base) :], size) for key, size in page if not key.startswith(foreign)]
            if len(page) < asked:
                break
            is_first, behind = False, _behind(page[-1][0], foreign)
        return found

    def _paged(self, ask: Callable[[], T], *, is_first: bool) -> T:
        """One request of a call that makes several. Where the call's time ends during a later one the server is not away: it has
        answered this very call."""
        try:
            return self._namespace.granted(ask)
        except UnavailableError as error:
            scope = current_scope()
            if is_first or scope is None or time.monotonic() < scope.deadline:
                raise
            raise BusyError("the call's time ended before all of it was done", reason=str(error)) from error

    def namespace(self) -> Namespace:
        """See `StoreLink.namespace`."""
        return self._namespace.get()

    def usage(self) -> tuple[int, int]:
        """See `StoreLink.usage`."""
        try:
            told = self._client.namespace(self._namespace.get().name)
        except NoSuchNamespaceError:
            if self._settings.namespace == DEFAULT_NAME:
                return 0, 0  # told to the bucket's owner alone
            raise
        return told.chunks, told.size_bytes

    def ping(self) -> bool:
        """See `StoreLink.ping`."""
        self._namespace.ping()
        return True

    def is_answered(self) -> bool:
        """Whether the server answers at this moment. A call that moved chunks and asks this behind them is over by its deadline."""
        return self._client.is_answered(timeout_seconds=self._checked_seconds)

    def forget_namespace(self) -> None:
        """See `UsedNamespace.forget`."""
        self._namespace.forget()

    def close(self, *, is_up: bool) -> None:
        """End the session, if the server is there to be told, and the connections. Idempotent."""
        with self._closing:
            self._is_closed = True
            session, self._session = self._session, None
        if session is not None:
            if is_up:
                session.close()
            else:
                session.abandon()
        self._helpers.close()
        self._store_helpers.close()
        self._client.close()
        self._bucket.close()

    # -- inside --------------------------------------------------------------------------------------------------
    @property
    def _checked_seconds(self) -> float:
        return min(CHECKED_SECONDS, self._settings.timeout_seconds / 2)

    def _deadline(self, size_bytes: int) -> float:
        """By when so many bytes are moved, if it is to be asked behind them whether the server answers at all (`is_answered`)."""
        seconds = self._settings.timeout_seconds + size_bytes * SECONDS_PER_BYTE
        return time.monotonic() + seconds - self._checked_seconds

    def _own_session(self) -> Session:
        session = self._session
        if session is not None:
            return session
        place = self._opening.take(self._settings.timeout_seconds)
        if place is None:
            raise UnavailableError("another thread still waits for a session to open")
        try:
            session = self._session
            if session is None:
                if self._is_closed:
                    raise UnavailableError("the link is closed")
                session = self._new_session().__enter__()
                if not self._is_kept(session):
                    session.close()
                    raise UnavailableError("the link was closed")
            return session
        finally:
            place.leave()

    def _is_kept(self, session: Session) -> bool:
        """Whether the session is the link's now. Not where `close` ran meanwhile: it found none to end, and this one would be
        renewed for ever."""
        with self._closing:
            if not self._is_closed:
                self._session = session
            return not self._is_closed

    def _new_session(self, *, is_automatic: bool = True) -> Session:
        holder = f"{socket.gethostname()}:{os.getpid()}"
        return Session(self._client, holder=holder, ttl_ms=self._settings.lease_ms, is_automatic=is_automatic)

    def _pinned(self, names: Sequence[Name]) -> list[Pin | None]:
        """A pin for each name that is live; of the first names alone where the session may not hold more. Where it raises, none is
        left."""
        space, session = self._namespace.get(), self._own_session()
        pins: list[Pin | None] = []
        try:
            for start in range(0, len(names), PINNED_AT_ONCE):
                if not pin_what_fits(session, space, names[start : start + PINNED_AT_ONCE], pins):
                    break
        except BaseException:
            let_go(pins)
            raise
        return pins

    def _read_pinned(self, pin: Pin, name: Name, view: memoryview | None) -> memoryview | None:
        """A chunk that is held: a DELETE may have hidden it from those who hold it not."""
        try:
            return self._own_session().read(pin, name, into=view)
        except CorruptionError:
            self._tally.corrupt()
        except InvalidRequestError:
            pass  # larger than its room
        return None


def _behind(key: str, foreign: tuple[str, ...]) -> str:
    """Where a listing goes on behind a key: past all of its namespace, if that is another's, of which there may be many more keys
    than of those that are asked for."""
    return next((prefix + _LAST_CHARACTER for prefix in foreign if key.startswith(prefix)), key)
