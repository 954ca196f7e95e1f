"""A holder's session: it renews itself from a thread of its own, and what it pins may be relied on until its lease runs out.

The holder's rule (`lease`) is kept here: a pinned chunk is read only while the lease is valid, and the bytes count only if it still
is when the last of them has come; otherwise it is a miss. A session that the server lost is opened anew, and what is still held
is pinned again; what is gone by then is a pin that is never valid again.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, Self, TypeVar

from kvobj.client.call_scope import ends_by, wait_by
from kvobj.client.forking import forget_in_child
from kvobj.client.kv import KvClient
from kvobj.client.kv_values import DEFAULT, MatchAnswer, Name, Namespace, ReadChunk, check_namespace
from kvobj.client.lease import Lease, boot_seconds
from kvobj.client.loans import Places
from kvobj.client.pin_ledger import PinLedger, Ticket
from kvobj.client.views import ChunkView
from kvobj.errors import (
    AccessDeniedError,
    InvalidRequestError,
    KvobjError,
    NoSuchNamespaceError,
    NoSuchSessionError,
    PinLimitExceededError,
    SessionExpiredError,
    UnavailableError,
)
from kvobj.ids.chunk_ids import Tokens, token_bytes

DEFAULT_TTL_MS: Final = 30_000
RELEASES_AT_ONCE: Final = 256
"""So many pins to be released are not kept waiting for the next renewal."""

_ABSENT: Final = object()
_RECLAIMED_AT_ONCE: Final = 1024
_RETRY_SHARE: Final = 4
_CLOSE_SECONDS: Final = 5.0
_CALL_SECONDS_MIN: Final = 0.2

_NOT_PINNED_AGAIN: Final = (AccessDeniedError, InvalidRequestError, NoSuchNamespaceError)
"""How names of one namespace are refused (the limit of pins, and a namespace that has other ids by now, among them), which says
nothing of the others that are held."""

_Answer = TypeVar("_Answer")


class _Epoch:
    """One session as the server knows it: id, lease, ledger. A holder goes through several where sessions are lost."""

    __slots__ = ("id", "is_needed", "lease", "ledger", "renew_seconds")

    def __init__(self, session_id: bytes, *, renew_ms: int) -> None:
        self.id = session_id
        self.is_needed = False
        self.renew_seconds = renew_ms / 1000
        self.lease = Lease()
        self.ledger = PinLedger()


@dataclass(frozen=True, slots=True)
class _Grant:
    """Ids of a pin, and with which session they live and die: one for all its names, or one for each, which `by_key` has then.
    `ticket` is of the request that they were granted to: they are released once nobody has it."""

    epoch: _Epoch
    ids: tuple[bytes, ...]
    ticket: Ticket
    by_key: Mapping[str, bytes] = field(default_factory=dict)

    def id_of(self, name: Name, namespace: Namespace) -> bytes:
        """The id to read a chunk with: its own, or that of the pin behind it in its chain."""
        last = self.ids[-1]
        return self.by_key.get(namespace.key_of(name), last) if self.by_key else last


class Pin:
    """What one match or pin holds: `names` and, where chunks have parents, all before the last of them. Thread-safe."""

    __slots__ = ("_grant", "_session", "names", "namespace")

    def __init__(self, session: Session, namespace: Namespace, names: tuple[Name, ...], grant: _Grant) -> None:
        self.namespace = namespace
        self.names = names
        self._session = session
        self._grant: _Grant | None = grant

    @property
    def is_valid(self) -> bool:
        """Whether the chunks may be relied on at this moment."""
        grant = self._grant
        return grant is not None and grant.epoch.lease.is_valid(self._session.now())

    def release(self) -> None:
        """Let go of it; the server is told with the next renewal. Idempotent."""
        self._session.release(self)


@dataclass(frozen=True, slots=True)
class PinnedMatch:
    """A match's answer, and the pin that holds what it found; None where nothing matched."""

    answer: MatchAnswer
    pin: Pin | None


class Session:
    """A context manager: entering opens a session and starts to renew it, leaving ends both. Thread-safe.

    It is renewed for as long as somebody has it, or a pin of it, and until its client is closed: then the thread that renews it
    ends it, when the next renewal is due at the latest. Entering raises `UnavailableError` where no thread can be started.

    It is the process's that opened it: in a forked child it is closed, its pins are valid no more, and the server hears nothing.

    `now` is `lease.boot_seconds` but in tests. Without a thread (`is_automatic` False) its owner calls `renew` himself.
    """

    def __init__(
        self,
        client: KvClient,
        *,
        holder: str = "",
        ttl_ms: int = DEFAULT_TTL_MS,
        is_automatic: bool = True,
        now: Callable[[], float] = boot_seconds,
    ) -> None:
        self.now = now
        self.reclaims = 0
        """How often pins had to be pinned again."""
        self._client = client
        self._holder = holder
        self._ttl_ms = ttl_ms
        self._is_automatic = is_automatic
        self._epochs: list[_Epoch] = []  # those that the server may have, the present one last; the thread's, too
        self._pins: dict[Pin, object] = {}
        self._lock = threading.Lock()
        self._renewing = Places(1)
        # A queue, and no event: putting takes no lock that an interrupt could leave held.
        self._wake: SimpleQueue[object] = SimpleQueue()
        self._is_woken = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        forget_in_child(self)

    def forget(self) -> None:
        """See `ForgetsInChild`: the parent goes on to renew it, and releases what it holds."""
        self._lock, self._renewing, self._wake = threading.Lock(), Places(1), SimpleQueue()
        self._thread = None
        self._is_closed = True
        self._lose_all()

    def __enter__(self) -> Self:
        if self._is_closed:
            raise _closed()
        epoch = self._open()
        try:
            self._epochs.append(epoch)
            if self._is_automatic:
                self._start(epoch)
        except KvobjError:
            raise
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def id(self) -> bytes:
        """The session's id at this moment."""
        return self._current().id

    @property
    def is_valid(self) -> bool:
        """Whether its lease holds at this moment."""
        epochs = self._epochs[-1:]
        return bool(epochs) and epochs[0].lease.is_valid(self.now())

    @property
    def renew_seconds(self) -> float:
        """How often it is to be renewed."""
        return self._current().renew_seconds

    def match(
        self,
        *,
        namespace: Namespace = DEFAULT,
        ids: Sequence[Name] | None = None,
        tokens: Tokens | None = None,
        is_chain: bool | None = None,
        detail: bool = False,
        explain: bool = False,
        output_tokens: int = 0,
        partial_last: bool = False,
    ) -> PinnedMatch:
        """`KvClient.match`, with what was found pinned. `is_chain`: the chunks have parents (always so where ids are kvobj's).

        `PinLimitExceededError`; where the session was lost it is opened anew and asked again, once, all within one timeout.
        """
        check_namespace(namespace)
        if tokens is not None:
            tokens = token_bytes(tokens)
            detail = detail or not _makes_ids(namespace)  # then only the server knows the names

        def ask(epoch: _Epoch) -> PinnedMatch:
            with self._lock:
                ticket = epoch.ledger.begin()
            answer = None
            sent_at = self.now()
            try:
                answer = self._client.match(
                    namespace=namespace,
                    ids=ids,
                    tokens=tokens,
                    session=epoch.id,
                    detail=detail,
                    explain=explain,
                    output_tokens=output_tokens,
                    partial_last=partial_last,
                )
            finally:
                pin_ids = () if answer is None or answer.pin is None else (answer.pin,)
                with self._lock:
                    grant = 0 if answer is None else answer.grant
                    epoch.ledger.end(ticket, grant=grant, pins=pin_ids, is_held_by_ticket=True)
            if answer.pin is None:
                return PinnedMatch(answer, None)
            epoch.lease.extend(sent_at, answer.deadline_ms)
            if epoch.lease.is_lost:
                raise _lost()
            chained = namespace.has_chains if is_chain is None else is_chain
            try:
                answer.check(ids)
                found = _found(answer, namespace, ids, tokens)
                names = tuple(found[-1:] if chained else found)
                pin = Pin(self, namespace, names, _Grant(epoch, pin_ids, ticket))
                pinned = PinnedMatch(answer, pin)
                self._keep([pin])
                return pinned  # noqa: TRY300 - up to here an interrupt releases it
            except BaseException:  # whatever it was, nobody knows of the pin
                with self._lock:
                    epoch.ledger.release(pin_ids)
                raise

        return self._asked(ask)

    def pin(self, tails: Sequence[Name], *, namespace: Namespace = DEFAULT) -> list[Pin | None]:
        """Pin chunks by name, and with each the chain before it; None for what is not live. Errors as `match`."""
        check_namespace(namespace)
        return self._asked(lambda epoch: self._pin(epoch, tails, namespace))

    def read(
        self,
        pin: Pin,
        name: Name,
        *,
        layers: tuple[int, int] | None = None,
        into: bytearray | memoryview | None = None,
    ) -> memoryview | None:
        """A pinned chunk's bytes; None for a miss: the pin does not hold now, or no longer when the last byte has come, or it holds
        no such chunk."""
        grant = pin._grant  # noqa: SLF001 - a pin and its session are one
        if grant is None or not grant.epoch.lease.is_valid(self.now()):
            return None
        lease = grant.epoch.lease
        timeout = self._read_seconds(pin)
        try:
            data = self._client.get_chunk(
                name,
                namespace=pin.namespace,
                layers=layers,
                pin=grant.id_of(name, pin.namespace),
                into=into,
                timeout_seconds=timeout,
            )
        except UnavailableError:
            if lease.is_valid(self.now()):
                raise
            return None
        return data if lease.is_valid(self.now()) else None

    def view(self, pin: Pin, name: Name) -> ChunkView | None:
        """A pinned chunk to be looked at where it is (`KvClient.view_chunk`), released by the caller; None if the pin does not hold
        now, or holds no such chunk. On the same host the view holds the bytes by itself from then on; who wants the pin's word as
        well asks `Pin.is_valid` after the use."""
        return self.view_many(pin, [name])[0]

    def view_many(self, pin: Pin, names: Sequence[Name]) -> list[ChunkView | None]:
        """`view` of many chunks of a pin by one question (`KvClient.view_chunks`), in the order of `names`."""
        grant = pin._grant  # noqa: SLF001 - a pin and its session are one
        misses: list[ChunkView | None] = [None] * len(names)
        if grant is None or not grant.epoch.lease.is_valid(self.now()):
            return misses
        lease, timeout = grant.epoch.lease, self._read_seconds(pin)
        pins = [grant.id_of(name, pin.namespace) for name in names]
        try:
            views = self._client.view_chunks(names, namespace=pin.namespace, pins=pins, timeout_seconds=timeout)
        except UnavailableError:
            if lease.is_valid(self.now()):
                raise
            return misses
        if lease.is_valid(self.now()):
            return views
        for view in views:
            if view is not None:
                view.release()
        return misses

    def read_many(
        self,
        pin: Pin,
        names: Sequence[Name],
        *,
        into: Callable[[int, int | None, int], memoryview | None] | None = None,
    ) -> Iterator[ReadChunk]:
        """Pinned chunks as a stream, in order, under the same rule as `read`: one whose `data` is None is a miss. Those that a
        DELETE has hidden since are read one by one, into new memory, while no stream is open: one connection is enough."""
        start = 0
        while start < len(names):
            behind: ReadChunk | None = None
            absent: list[int] = []
            if _holds(pin):
                with closing(self._stream(pin, names, start, into)) as stream:
                    for item in stream:
                        start = item.index + 1
                        if item.data is None:
                            # So are mostly all behind it: with a chunk go those that it is the parent of.
                            absent.append(item.index)
                        elif absent:
                            behind = item
                            break
                        else:
                            yield item if _holds(pin) else ReadChunk(item.index, None, None)
            for index in absent:
                yield ReadChunk(index, None, self.read(pin, names[index]))
            if behind is not None:
                yield behind if _holds(pin) else ReadChunk(behind.index, None, None)
            else:
                yield from (ReadChunk(index, None, None) for index in range(start, len(names)))
                return

    def release(self, pin: Pin) -> None:
        """See `Pin.release`."""
        with self._lock:
            self._pins.pop(pin, None)
            grant, pin._grant = pin._grant, None  # noqa: SLF001 - a pin and its session are one
            if grant is None:
                return
            grant.epoch.ledger.release(grant.ids)
            is_much = grant.epoch.ledger.leaving >= RELEASES_AT_ONCE
        if is_much and not self._is_woken:
            self._is_woken = True
            self._wake.put(None)

    def renew(self) -> None:
        """Renew once: release what was let go of, extend the lease, and pin again what the server lost. A lost session is replaced;
        other errors of the calls pass through, and the next renewal goes on where this one ended. `UnavailableError` where another
        thread's renewal does not end within the client's timeout."""
        place = self._renewing.take(self._client.timeout_seconds)
        if place is None:
            raise UnavailableError("another thread still renews the session")
        try:
            epoch = self._current()
            with self._lock:
                statement = epoch.ledger.statement()
            sent_at = self.now()
            try:
                answer = self._client.renew_session(epoch.id, statement, timeout_seconds=_call_seconds(epoch))
            except (NoSuchSessionError, SessionExpiredError):
                epoch.lease.lose()
                epoch = self._replace()
            else:
                epoch.lease.extend(sent_at, answer.ttl_ms)
                with self._lock:
                    epoch.ledger.confirm(statement)
                if answer.reclaim:
                    epoch = self._replace()
            self._reclaim(epoch)
        finally:
            place.leave()

    def abandon(self) -> None:
        """Stop to renew and tell nobody: what a holder's crash looks like to the server. Pins hold until their TTL."""
        self._leave(is_told=False)
        self._wait_for_thread()

    def close(self) -> None:
        """End the session and all its pins. Errors of the last calls are not told: the session then ends by its TTL. One that is
        being opened in the place of a lost one is closed once it is open. Idempotent."""
        self._leave(is_told=True)
        self._wait_for_thread()
        _end_all(self._client, self._lose_all())

    # -- inside --------------------------------------------------------------------------------------------------
    @property
    def _is_renewed(self) -> bool:
        return self._is_automatic and not self._is_closed

    def _read_seconds(self, pin: Pin) -> float | None:
        """How long a read may wait: the client's timeout, or for as long as the lease holds where nobody renews it."""
        grant = pin._grant  # noqa: SLF001 - a pin and its session are one
        if self._is_renewed or grant is None:
            return None
        return max(_CALL_SECONDS_MIN, grant.epoch.lease.left_seconds(self.now()))

    def _lose_all(self) -> list[_Epoch]:
        """Rely on no pin any more. Those sessions that the server still has, as far as is known: each is told once."""
        with self._lock:
            epochs = [each for each in self._epochs if not each.lease.is_lost]
            for epoch in epochs:
                epoch.lease.lose()
        return epochs

    def _stream(
        self,
        pin: Pin,
        names: Sequence[Name],
        start: int,
        into: Callable[[int, int | None, int], memoryview | None] | None,
    ) -> Generator[ReadChunk]:
        """`KvClient.mget` of the names from one on; indexes are those of all names. It ends where the pin holds no more."""

        def room(index: int, layer: int | None, size_bytes: int) -> memoryview | None:
            return None if into is None else into(start + index, layer, size_bytes)

        items = self._client.mget(
            names[start:], namespace=pin.namespace, into=room, timeout_seconds=self._read_seconds(pin)
        )
        with closing(items):  # type: ignore[type-var]  # a generator
            try:
                for item in items:
                    yield ReadChunk(start + item.index, item.layer, item.data)
            except UnavailableError:
                if _holds(pin):
                    raise

    def _current(self) -> _Epoch:
        epochs = self._epochs[-1:]
        if not epochs or self._is_closed:
            raise _closed()
        return epochs[0]

    def _open(self) -> _Epoch:
        sent_at = self.now()
        answer = self._client.open_session(holder=self._holder, ttl_ms=self._ttl_ms)
        epoch = _Epoch(answer.session, renew_ms=answer.renew_ms)
        epoch.lease.extend(sent_at, answer.ttl_ms)
        return epoch

    def _keep(self, pins: Sequence[Pin]) -> None:
        """Note pins that are about to be handed out: all, or none where it is interrupted, and so nobody gets them."""
        try:
            noted = dict.fromkeys(pins)
            with self._lock:
                self._pins |= noted
        except BaseException:
            with self._lock:
                for pin in pins:
                    self._pins.pop(pin, None)
            raise

    def _asked(self, ask: Callable[[_Epoch], _Answer]) -> _Answer:
        epoch = self._current()
        deadline = time.monotonic() + self._client.timeout_seconds
        try:
            return ask(epoch)
        except (NoSuchSessionError, SessionExpiredError):
            epoch.lease.lose()
        except PinLimitExceededError:
            with self._lock:
                is_full = not epoch.ledger.leaving
            if is_full:
                raise
        with ends_by(deadline):
            self.renew()
            return ask(self._current())

    def _pin(self, epoch: _Epoch, tails: Sequence[Name], namespace: Namespace) -> list[Pin | None]:
        ids, ticket = self._granted(epoch, tails, namespace)
        if epoch.lease.is_lost:
            raise _lost()
        pins = [
            None if pin_id is None else Pin(self, namespace, (tail,), _Grant(epoch, (pin_id,), ticket))
            for tail, pin_id in zip(tails, ids, strict=True)
        ]
        self._keep([pin for pin in pins if pin is not None])
        return pins

    def _granted(
        self, epoch: _Epoch, tails: Sequence[Name], namespace: Namespace, *, timeout_seconds: float | None = None
    ) -> tuple[list[bytes | None], Ticket]:
        """The pins' ids, and what is kept for as long as they are to be held."""
        with self._lock:
            ticket = epoch.ledger.begin()
        answer = None
        sent_at = self.now()
        try:
            answer = self._client.pin_tails(epoch.id, tails, namespace=namespace, timeout_seconds=timeout_seconds)
        finally:
            ids = [] if answer is None else [each.pin for each in answer.pins]
            with self._lock:
                pins = [each for each in ids if each is not None]
                grant = 0 if answer is None or not pins else answer.grant
                epoch.ledger.end(ticket, grant=grant, pins=pins, is_held_by_ticket=True)
        if len(ids) != len(tails):
            with self._lock:
                epoch.ledger.release(pins)
            raise UnavailableError("the server answers for other chunks", given=len(ids), wanted=len(tails))
        epoch.lease.extend(sent_at, answer.deadline_ms)
        return ids, ticket

    def _replace(self) -> _Epoch:
        """Open another session. `NoSuchSessionError` where this one was closed meanwhile: whoever did so knew of no other."""
        new = self._open()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._epochs.append(new)
        if is_closed:
            _end(self._client, new, timeout_seconds=_CLOSE_SECONDS)
            raise _closed()
        self.reclaims += 1
        return new

    def _reclaim(self, new: _Epoch) -> None:
        """Pin under the present session what is held under those before it; called by who renews.

        What is not live any more, or may not be pinned, stays with its old session where the server still has that, until its lease
        runs out: a DELETE may have hidden it. An old session with which nothing stays is closed.
        """
        with self._lock:
            held = [(pin, pin._grant) for pin in self._pins]  # noqa: SLF001 - a pin and its session are one
        behind = [(pin, grant) for pin, grant in held if grant is not None and grant.epoch is not new]
        for group in _grouped(behind):
            self._current()  # who closed it has ended the new session, or is about to
            names = _of_one_kind([name for pin, _ in group for name in pin.names])
            try:
                seconds = _call_seconds(new)
                granted, ticket = self._granted(new, names, group[0][0].namespace, timeout_seconds=seconds)
            except _NOT_PINNED_AGAIN:
                granted, ticket = [None] * len(names), Ticket(0)
            ids = iter(granted)
            for pin, grant in group:
                self._move(pin, grant, new, [next(ids) for _ in pin.names], ticket)
        with self._lock:
            past = [old for old in self._epochs if old is not new and not old.lease.is_lost]
            unneeded = [old for old in past if not old.is_needed]
            self._epochs[:] = [*[old for old in past if old.is_needed and old.lease.is_valid(self.now())], new]
        for old in unneeded:
            _end(self._client, old, timeout_seconds=_call_seconds(new))

    def _move(self, pin: Pin, old: _Grant, new: _Epoch, ids: Sequence[bytes | None], ticket: Ticket) -> None:
        granted = tuple([each for each in ids if each is not None])
        with self._lock:
            if pin._grant is not old or len(granted) < len(pin.names):  # noqa: SLF001 - a pin and its session are one
                new.ledger.release(granted)
                if self._pins.pop(pin, _ABSENT) is not _ABSENT:
                    old.epoch.is_needed = True
            else:
                keys = [pin.namespace.key_of(name) for name in pin.names] if len(granted) > 1 else []
                pin._grant = _Grant(new, granted, ticket, dict(zip(keys, granted, strict=False)))  # noqa: SLF001

    def _start(self, epoch: _Epoch) -> None:
        """Start the thread that renews it. The thread has no reference to it but a weak one: it ends with it."""
        wake = self._wake
        # Its first pause is handed over: the session may be closed before the thread begins. The callback is written in C, and
        # so is sure to run (`loans`).
        arguments = (weakref.ref(self, wake.put), self._client, self._epochs, wake, epoch.renew_seconds)
        thread = threading.Thread(target=_keep_renewed, args=arguments, name="kvobj-session", daemon=True)
        handled = sys.exception()
        try:
            thread.start()
        except RuntimeError as error:
            interrupt = error.__context__
            if interrupt is not None and interrupt is not handled:
                raise interrupt from None  # in the middle of the start, whose own locks then fail
            self._epochs.remove(epoch)
            _end(self._client, epoch, timeout_seconds=_CLOSE_SECONDS)
            raise UnavailableError("no thread can be started to renew the session") from error
        self._thread = thread

    def _turn(self) -> float | None:
        """What its thread does at each of its turns; in how many seconds the next one is due, None where this was the last."""
        self._is_woken = False
        if self._is_closed or self._client.is_closed:
            self._leave(is_told=True)
            _end_all(self._client, self._lose_all())
            return None
        pause = self._epochs[-1].renew_seconds / _RETRY_SHARE  # until it works: the lease says meanwhile what holds
        with suppress(KvobjError):
            self.renew()
            pause = self.renew_seconds
        return pause

    def _leave(self, *, is_told: bool) -> None:
        """Renew it no more; waits for nothing. `is_told`: the thread ends it where nobody does so before."""
        # A session that is opened at this moment is either known from here on, or closed by who opened it.
        with self._lock:
            self._is_closed = True
            for epoch in self._epochs if not is_told else ():
                epoch.lease.lose()
        self._wake.put(None)

    def _wait_for_thread(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():

            def is_over(seconds: float) -> bool:
                thread.join(seconds)
                return not thread.is_alive()

            wait_by(time.monotonic() + _CLOSE_SECONDS, is_over)
            self._thread = None


def _keep_renewed(
    session: weakref.ref[Session],
    client: KvClient,
    epochs: list[_Epoch],
    wake: SimpleQueue[object],
    pause: float | None,
) -> None:
    """Renew a session until it is closed. One that nobody has any more is ended here: a destructor must not wait for a server."""
    while pause is not None:
        with suppress(Empty):
            wake.get(timeout=pause)
        held = session()
        if held is None:
            _end_all(client, [each for each in epochs if not each.lease.is_lost])
            return
        pause = held._turn()  # noqa: SLF001 - a session and its thread are one
        del held


def _end_all(client: KvClient, epochs: Iterable[_Epoch]) -> None:
    with ends_by(time.monotonic() + _CLOSE_SECONDS):
        for epoch in epochs:
            _end(client, epoch)


def _end(client: KvClient, epoch: _Epoch, *, timeout_seconds: float | None = None) -> None:
    """Close a session that nothing relies on. Where that fails it ends by its TTL."""
    epoch.lease.lose()  # first: what is granted under it at this moment must not be relied on
    with suppress(KvobjError):
        client.close_session(epoch.id, timeout_seconds=timeout_seconds)


def _found(
    answer: MatchAnswer, namespace: Namespace, ids: Sequence[Name] | None, tokens: Tokens | None
) -> Sequence[Name]:
    """The names of what a match found."""
    if ids is None:
        if not _makes_ids(namespace) or tokens is None:
            return [chunk.id for chunk in answer.chunks]
        ids = namespace.chunk_ids(tokens, partial_last=True)
    return ids[: answer.matched]


def _makes_ids(namespace: Namespace) -> bool:
    """Whether the names of a sequence's chunks are known without the server: not without the namespace's key, which lists leave
    out."""
    return namespace.has_chains and bool(namespace.key)


def _lost() -> NoSuchSessionError:
    """Another thread found the session lost, and ended it, while this one's request was under way: who asked asks the next one."""
    return NoSuchSessionError("the session was replaced meanwhile")


def _closed() -> NoSuchSessionError:
    return NoSuchSessionError("the session is not open")


def _holds(pin: Pin) -> bool:
    """`Pin.is_valid`, which may be another each time."""
    return pin.is_valid


def _call_seconds(epoch: _Epoch) -> float:
    """A renewal that hangs must leave time for another."""
    return max(_CALL_SECONDS_MIN, epoch.renew_seconds)


def _of_one_kind(names: Sequence[Name]) -> Sequence[Name]:
    """The same names in one form, as one request has them: raw ids are written out where others are."""
    if any(isinstance(name, str) for name in names):
        return [name if isinstance(name, str) else name.hex() for name in names]
    return names


def _grouped(pins: Sequence[tuple[Pin, _Grant]]) -> Iterator[Sequence[tuple[Pin, _Grant]]]:
    """Pins that one request can pin again: some of one namespace."""
    for name in sorted({pin.namespace.name for pin, _ in pins}):
        group = [(pin, grant) for pin, grant in pins if pin.namespace.name == name]
        for start in range(0, len(group), _RECLAIMED_AT_ONCE):
            yield group[start : start + _RECLAIMED_AT_ONCE]
