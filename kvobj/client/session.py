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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Self, TypeVar

from kvobj.client.call_scope import bounded_seconds, ends_by, wait_by
from kvobj.client.forking import forget_in_child
from kvobj.client.kv import KvClient
from kvobj.client.kv_values import (
    ANY_FORM,
    DEFAULT,
    RAW,
    MatchAnswer,
    Name,
    Namespace,
    ReadChunk,
    accepted,
    check_namespace,
)
from kvobj.client.lease import boot_seconds
from kvobj.client.loans import Places
from kvobj.client.pin_ledger import Ticket
from kvobj.client.pins import Grant, HeldPins, Pin, ServerSession, grant_of, grouped, names_of
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

__all__ = ["DEFAULT_TTL_MS", "RELEASES_AT_ONCE", "Pin", "PinnedMatch", "Session"]

DEFAULT_TTL_MS: Final = 30_000
RELEASES_AT_ONCE: Final = 256
"""So many pins to be released are not kept waiting for the next renewal."""

_RETRY_SHARE: Final = 4
_CLOSE_SECONDS: Final = 5.0
_CALL_SECONDS_MIN: Final = 0.2

_NOT_PINNED_AGAIN: Final = (AccessDeniedError, InvalidRequestError, NoSuchNamespaceError)
"""How names of one namespace are refused (the limit of pins, and a namespace that has other ids by now, among them), which says
nothing of the others that are held."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True)
class PinnedMatch:
    """A match's answer, and the pin that holds what it found; None where nothing matched."""

    answer: MatchAnswer
    pin: Pin | None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a match asks for, as far as it names what is found. `is_chain`: the chunks have parents."""

    namespace: Namespace
    ids: Sequence[Name] | None
    tokens: bytes | None
    is_chain: bool

    @property
    def needs_names(self) -> bool:
        """Whether only the server knows what the chunks are called: of tokens, where the namespace's key is not known here, as
        lists leave it out."""
        return self.tokens is not None and not self._makes_ids

    @property
    def _makes_ids(self) -> bool:
        return self.namespace.has_chains and bool(self.namespace.key)

    def pinned_names(self, answer: MatchAnswer) -> tuple[Name, ...]:
        """What a pin of the answer holds by name. `UnavailableError` where that is more than was asked for."""
        answer.check(self.ids)
        found = self._found(answer)
        return tuple(found[-1:] if self.is_chain else found)

    def _found(self, answer: MatchAnswer) -> Sequence[Name]:
        if self.ids is not None:
            return self.ids[: answer.matched]
        if self.tokens is None or not self._makes_ids:
            return [chunk.id for chunk in answer.chunks]
        return self.namespace.chunk_ids(self.tokens, partial_last=True)[: answer.matched]


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
        self._server_sessions: list[ServerSession] = []
        """Those that the server may have, the present one last. The thread has the same list."""
        self._pins = HeldPins()
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
        server_session = self._open()
        try:
            self._server_sessions.append(server_session)
            if self._is_automatic:
                self._start(server_session)
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
        server_sessions = self._server_sessions[-1:]
        return bool(server_sessions) and server_sessions[0].lease.is_valid(self.now())

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
        accept: Sequence[str] = (RAW,),
        max_error: float | None = None,
        timeout_seconds: float | None = None,
    ) -> PinnedMatch:
        """`KvClient.match`, with what was found pinned. `is_chain`: the chunks have parents (always so where ids are kvobj's).

        `PinLimitExceededError`; where the session was lost it is opened anew and asked again, once, all within the timeout.
        """
        check_namespace(namespace)
        given = None if tokens is None else token_bytes(tokens)
        wanted = _Wanted(namespace, ids, given, is_chain=namespace.has_chains if is_chain is None else is_chain)
        ask = partial(
            self._client.match,
            namespace=namespace,
            ids=ids,
            tokens=given,
            detail=detail or wanted.needs_names,
            explain=explain,
            output_tokens=output_tokens,
            partial_last=partial_last,
            accept=accept,
            max_error=max_error,
            timeout_seconds=timeout_seconds,
        )
        return self._asked(lambda present: self._match(present, ask, wanted), timeout_seconds)

    def pin(
        self,
        tails: Sequence[Name],
        *,
        namespace: Namespace = DEFAULT,
        accept: Sequence[str] = (RAW,),
        max_error: float | None = None,
    ) -> list[Pin | None]:
        """Pin chunks by name, and with each the chain before it; None for what is not live, or left in no form that is accepted
        (`KvClient.match`). Errors as `match`."""
        check_namespace(namespace)
        items = accepted(accept, max_error)
        return self._asked(lambda server_session: self._pin(server_session, tails, namespace, items))

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
        grant = grant_of(pin)
        if grant is None or not grant.server_session.lease.is_valid(self.now()):
            return None
        lease = grant.server_session.lease
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
        grant = grant_of(pin)
        misses: list[ChunkView | None] = [None] * len(names)
        if grant is None or not grant.server_session.lease.is_valid(self.now()):
            return misses
        lease, timeout = grant.server_session.lease, self._read_seconds(pin)
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
            grant = self._pins.let_go(pin)
            if grant is None:
                return
            grant.server_session.ledger.release(grant.ids)
            is_much = grant.server_session.ledger.leaving >= RELEASES_AT_ONCE
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
            server_session = self._current()
            with self._lock:
                statement = server_session.ledger.statement()
            sent_at = self.now()
            try:
                answer = self._client.renew_session(
                    server_session.id, statement, timeout_seconds=_call_seconds(server_session)
                )
            except (NoSuchSessionError, SessionExpiredError):
                server_session.lease.lose()
                server_session = self._replace()
            else:
                server_session.lease.extend(sent_at, answer.ttl_ms)
                with self._lock:
                    server_session.ledger.confirm(statement)
                if answer.reclaim:
                    server_session = self._replace()
            self._reclaim(server_session)
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
        grant = grant_of(pin)
        if self._is_renewed or grant is None:
            return None
        return max(_CALL_SECONDS_MIN, grant.server_session.lease.left_seconds(self.now()))

    def _lose_all(self) -> list[ServerSession]:
        """Rely on no pin any more. Those sessions that the server still has, as far as is known: each is told once."""
        with self._lock:
            server_sessions = [each for each in self._server_sessions if not each.lease.is_lost]
            for server_session in server_sessions:
                server_session.lease.lose()
        return server_sessions

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

    def _current(self) -> ServerSession:
        server_sessions = self._server_sessions[-1:]
        if not server_sessions or self._is_closed:
            raise _closed()
        return server_sessions[0]

    def _open(self) -> ServerSession:
        sent_at = self.now()
        answer = self._client.open_session(holder=self._holder, ttl_ms=self._ttl_ms)
        server_session = ServerSession(answer.session, renew_ms=answer.renew_ms)
        server_session.lease.extend(sent_at, answer.ttl_ms)
        return server_session

    def _keep(self, pins: Sequence[Pin]) -> None:
        """Note pins that are about to be handed out: all, or none where it is interrupted, and so nobody gets them."""
        try:
            noted = dict.fromkeys(pins)
            with self._lock:
                self._pins.add(noted)
        except BaseException:
            with self._lock:
                self._pins.drop(pins)
            raise

    def _asked(self, ask: Callable[[ServerSession], _Answer], timeout_seconds: float | None = None) -> _Answer:
        seconds = self._client.timeout_seconds if timeout_seconds is None else bounded_seconds(timeout_seconds)
        deadline = time.monotonic() + seconds
        server_session = self._current()
        try:
            return ask(server_session)
        except (NoSuchSessionError, SessionExpiredError):
            server_session.lease.lose()
        except PinLimitExceededError:
            with self._lock:
                is_full = not server_session.ledger.leaving
            if is_full:
                raise
        with ends_by(deadline):
            self.renew()
            return ask(self._current())

    def _match(self, server_session: ServerSession, ask: Callable[..., MatchAnswer], wanted: _Wanted) -> PinnedMatch:
        answer, ticket = self._matched(server_session, ask)
        if answer.pin is None:
            return PinnedMatch(answer, None)
        try:
            names = wanted.pinned_names(answer)
            pin = Pin(self, wanted.namespace, names, Grant(server_session, (answer.pin,), ticket))
            pinned = PinnedMatch(answer, pin)
            self._keep([pin])
            return pinned  # noqa: TRY300 - up to here an interrupt releases it
        except BaseException:  # whatever it was, nobody knows of the pin
            with self._lock:
                server_session.ledger.release((answer.pin,))
            raise

    def _matched(self, server_session: ServerSession, ask: Callable[..., MatchAnswer]) -> tuple[MatchAnswer, Ticket]:
        """A match's answer, and what is kept for as long as its pin is to be held."""
        with self._lock:
            ticket = server_session.ledger.begin()
        answer = None
        sent_at = self.now()
        try:
            answer = ask(session=server_session.id)
        finally:
            pins = () if answer is None or answer.pin is None else (answer.pin,)
            with self._lock:
                grant = 0 if answer is None else answer.grant
                server_session.ledger.end(ticket, grant=grant, pins=pins, is_held_by_ticket=True)
        if answer.pin is not None:
            server_session.lease.extend(sent_at, answer.deadline_ms)
            if server_session.lease.is_lost:
                raise _lost()
        return answer, ticket

    def _pin(
        self, server_session: ServerSession, tails: Sequence[Name], namespace: Namespace, accept: Sequence[str]
    ) -> list[Pin | None]:
        ids, ticket = self._granted(server_session, tails, namespace, accept=accept)
        if server_session.lease.is_lost:
            raise _lost()
        pins = [
            None if pin_id is None else Pin(self, namespace, (tail,), Grant(server_session, (pin_id,), ticket))
            for tail, pin_id in zip(tails, ids, strict=True)
        ]
        self._keep([pin for pin in pins if pin is not None])
        return pins

    def _granted(
        self,
        server_session: ServerSession,
        tails: Sequence[Name],
        namespace: Namespace,
        *,
        accept: Sequence[str],
        timeout_seconds: float | None = None,
    ) -> tuple[list[bytes | None], Ticket]:
        """The pins' ids, and what is kept for as long as they are to be held."""
        with self._lock:
            ticket = server_session.ledger.begin()
        answer = None
        sent_at = self.now()
        try:
            answer = self._client.pin_tails(
                server_session.id, tails, namespace=namespace, timeout_seconds=timeout_seconds, accept=accept
            )
        finally:
            ids = [] if answer is None else [each.pin for each in answer.pins]
            with self._lock:
                pins = [each for each in ids if each is not None]
                grant = 0 if answer is None or not pins else answer.grant
                server_session.ledger.end(ticket, grant=grant, pins=pins, is_held_by_ticket=True)
        if len(ids) != len(tails):
            with self._lock:
                server_session.ledger.release(pins)
            raise UnavailableError("the server answers for other chunks", given=len(ids), wanted=len(tails))
        server_session.lease.extend(sent_at, answer.deadline_ms)
        return ids, ticket

    def _replace(self) -> ServerSession:
        """Open another session. `NoSuchSessionError` where this one was closed meanwhile: whoever did so knew of no other."""
        new = self._open()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._server_sessions.append(new)
        if is_closed:
            _end(self._client, new, timeout_seconds=_CLOSE_SECONDS)
            raise _closed()
        self.reclaims += 1
        return new

    def _reclaim(self, new: ServerSession) -> None:
        """Pin under the present session what is held under those before it; called by who renews.

        What is not live any more, or may not be pinned, stays with its old session where the server still has that, until its lease
        runs out: a DELETE may have hidden it. An old session with which nothing stays is closed.
        """
        with self._lock:
            behind = self._pins.behind(new)
        for group in grouped(behind):
            self._current()  # who closed it has ended the new session, or is about to
            names = names_of(group)
            try:
                seconds = _call_seconds(new)
                # In whatever form they are left: what a tail protects may be there as it was put still.
                granted, ticket = self._granted(
                    new, names, group[0][0].namespace, accept=ANY_FORM, timeout_seconds=seconds
                )
            except _NOT_PINNED_AGAIN:
                granted, ticket = [None] * len(names), Ticket(0)
            ids = iter(granted)
            for pin, grant in group:
                with self._lock:
                    self._pins.move(pin, grant, new, [next(ids) for _ in pin.names], ticket)
        with self._lock:
            past = [old for old in self._server_sessions if old is not new and not old.lease.is_lost]
            unneeded = [old for old in past if not old.is_needed]
            self._server_sessions[:] = [*[old for old in past if old.is_needed and old.lease.is_valid(self.now())], new]
        for old in unneeded:
            _end(self._client, old, timeout_seconds=_call_seconds(new))

    def _start(self, server_session: ServerSession) -> None:
        """Start the thread that renews it. The thread has no reference to it but a weak one: it ends with it."""
        wake = self._wake
        # Its first pause is handed over: the session may be closed before the thread begins. The callback is written in C, and
        # so is sure to run (`loans`).
        arguments = (
            weakref.ref(self, wake.put),
            self._client,
            self._server_sessions,
            wake,
            server_session.renew_seconds,
        )
        thread = threading.Thread(target=_keep_renewed, args=arguments, name="kvobj-session", daemon=True)
        handled = sys.exception()
        try:
            thread.start()
        except RuntimeError as error:
            interrupt = error.__context__
            if interrupt is not None and interrupt is not handled:
                raise interrupt from None  # in the middle of the start, whose own locks then fail
            self._server_sessions.remove(server_session)
            _end(self._client, server_session, timeout_seconds=_CLOSE_SECONDS)
            raise UnavailableError("no thread can be started to renew the session") from error
        self._thread = thread

    def _turn(self) -> float | None:
        """What its thread does at each of its turns; in how many seconds the next one is due, None where this was the last."""
        self._is_woken = False
        if self._is_closed or self._client.is_closed:
            self._leave(is_told=True)
            _end_all(self._client, self._lose_all())
            return None
        # Until it works: the lease says meanwhile what holds.
        pause = self._server_sessions[-1].renew_seconds / _RETRY_SHARE
        with suppress(KvobjError):
            self.renew()
            pause = self.renew_seconds
        return pause

    def _leave(self, *, is_told: bool) -> None:
        """Renew it no more; waits for nothing. `is_told`: the thread ends it where nobody does so before."""
        # A session that is opened at this moment is either known from here on, or closed by who opened it.
        with self._lock:
            self._is_closed = True
            for server_session in self._server_sessions if not is_told else ():
                server_session.lease.lose()
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
    server_sessions: list[ServerSession],
    wake: SimpleQueue[object],
    pause: float | None,
) -> None:
    """Renew a session until it is closed. One that nobody has any more is ended here: a destructor must not wait for a server."""
    while pause is not None:
        with suppress(Empty):
            wake.get(timeout=pause)
        held = session()
        if held is None:
            _end_all(client, [each for each in server_sessions if not each.lease.is_lost])
            return
        pause = held._turn()  # noqa: SLF001 - a session and its thread are one
        del held


def _end_all(client: KvClient, server_sessions: Iterable[ServerSession]) -> None:
    with ends_by(time.monotonic() + _CLOSE_SECONDS):
        for server_session in server_sessions:
            _end(client, server_session)


def _end(client: KvClient, server_session: ServerSession, *, timeout_seconds: float | None = None) -> None:
    """Close a session that nothing relies on. Where that fails it ends by its TTL."""
    server_session.lease.lose()  # first: what is granted under it at this moment must not be relied on
    with suppress(KvobjError):
        client.close_session(server_session.id, timeout_seconds=timeout_seconds)


def _lost() -> NoSuchSessionError:
    """Another thread found the session lost, and ended it, while this one's request was under way: who asked asks the next one."""
    return NoSuchSessionError("the session was replaced meanwhile")


def _closed() -> NoSuchSessionError:
    return NoSuchSessionError("the session is not open")


def _holds(pin: Pin) -> bool:
    """`Pin.is_valid`, which may be another each time."""
    return pin.is_valid


def _call_seconds(server_session: ServerSession) -> float:
    """A renewal that hangs must leave time for another."""
    return max(_CALL_SECONDS_MIN, server_session.renew_seconds)
