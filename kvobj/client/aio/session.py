"""`AsyncSession`: a `Session` for an event loop. Its contracts stand there; it renews itself from the same thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from kvobj.client.aio.calls import OnThreads, awaited, streamed
from kvobj.client.aio.kv import AsyncKvClient, let_go_view, let_go_views
from kvobj.client.lease import boot_seconds
from kvobj.client.pins import Pin
from kvobj.client.session import DEFAULT_TTL_MS, PinnedMatch, Session
from kvobj.errors import UnavailableError


def _let_go(found: PinnedMatch) -> None:
    """Of what a cancelled match had pinned nobody would know."""
    if found.pin is not None:
        found.pin.release()


def _let_go_all(pins: Sequence[Pin | None]) -> None:
    for pin in pins:
        if pin is not None:
            pin.release()


def _leave(core: Session, *, is_told: bool) -> None:
    """Have it renewed no more, before anything is waited for that may be cancelled."""
    core._leave(is_told=is_told)  # noqa: SLF001 - both are one session


def _leave_opened(core: Session) -> None:
    """Of a session that a cancelled task had opened nobody would know."""
    _leave(core, is_told=True)


class AsyncSession(OnThreads[Session]):
    """An asynchronous context manager: entering opens a session and starts to renew it, leaving ends both. Tasks share it.

    The pins are those of `Session`: `Pin.is_valid` and `Pin.release` wait for nothing and are no coroutines.
    """

    def __init__(
        self,
        client: AsyncKvClient,
        *,
        holder: str = "",
        ttl_ms: int = DEFAULT_TTL_MS,
        is_automatic: bool = True,
        now: Callable[[], float] = boot_seconds,
    ) -> None:
        core = Session(client.core, holder=holder, ttl_ms=ttl_ms, is_automatic=is_automatic, now=now)
        super().__init__(core, client.calls, client.streams, client.leases, timeout_seconds=client.timeout_seconds)

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def id(self) -> bytes:
        """The session's id at this moment."""
        return self.core.id

    @property
    def is_valid(self) -> bool:
        """Whether its lease holds at this moment."""
        return self.core.is_valid

    @property
    def renew_seconds(self) -> float:
        """How often it is to be renewed."""
        return self.core.renew_seconds

    @property
    def reclaims(self) -> int:
        """How often pins had to be pinned again."""
        return self.core.reclaims

    async def abandon(self) -> None:
        """See `Session.abandon`; all the same where it is cancelled."""
        _leave(self.core, is_told=False)
        with suppress(UnavailableError):  # no thread to wait for its own thread's end
            await self._abandon()

    async def close(self) -> None:
        """See `Session.close`. Where it is cancelled, or no thread comes free in time, the thread that renews the session ends it;
        one without such a thread ends by its TTL."""
        _leave(self.core, is_told=True)
        with suppress(UnavailableError):
            await self._close()

    def now(self) -> float:
        """The holder's clock."""
        return self.core.now()

    def release(self, pin: Pin) -> None:
        """See `Pin.release`."""
        self.core.release(pin)

    match = awaited(Session.match, undo=_let_go)
    pin = awaited(Session.pin, undo=_let_go_all)
    read = awaited(Session.read)
    view = awaited(Session.view, undo=let_go_view)
    view_many = awaited(Session.view_many, undo=let_go_views)
    read_many = streamed(Session.read_many)
    renew = awaited(Session.renew, is_lease=True)

    _enter = awaited(Session.__enter__, undo=_leave_opened, is_lease=True)
    _abandon = awaited(Session.abandon, is_lease=True)
    _close = awaited(Session.close, is_lease=True)
