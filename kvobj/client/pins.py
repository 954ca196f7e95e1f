"""A holder's pins, each with the session of the server's under which it lives. What keeps them alive is in `session`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvobj.client.kv_values import Name, Namespace
from kvobj.client.lease import Lease
from kvobj.client.pin_ledger import PinLedger, Ticket

_ABSENT: Final = object()
_AT_ONCE: Final = 1024
"""So many are pinned again by one request."""


class ServerSession:
    """One session as the server knows it: id, lease, ledger. A holder goes through several where sessions are lost."""

    __slots__ = ("id", "is_needed", "lease", "ledger", "renew_seconds")

    def __init__(self, session_id: bytes, *, renew_ms: int) -> None:
        self.id = session_id
        self.is_needed = False
        """Whether something that could not be pinned again stays with it."""
        self.renew_seconds = renew_ms / 1000
        self.lease = Lease()
        self.ledger = PinLedger()


@dataclass(frozen=True, slots=True)
class Grant:
    """Ids of a pin, and with which session they live and die: one for all its names, or one for each, which `by_key` has then.
    `ticket` is of the request that they were granted to: they are released once nobody has it."""

    server_session: ServerSession
    ids: tuple[bytes, ...]
    ticket: Ticket
    by_key: Mapping[str, bytes] = field(default_factory=dict)

    def id_of(self, name: Name, namespace: Namespace) -> bytes:
        """The id to read a chunk with: its own, or that of the pin behind it in its chain."""
        last = self.ids[-1]
        return self.by_key.get(namespace.key_of(name), last) if self.by_key else last


class Holder(Protocol):
    """Whose pins they are: a `Session`."""

    now: Callable[[], float]

    def release(self, pin: Pin) -> None:
        """See `Pin.release`."""


class Pin:
    """What one match or pin holds: `names` and, where chunks have parents, all before the last of them. Thread-safe."""

    __slots__ = ("_grant", "_holder", "names", "namespace")

    def __init__(self, holder: Holder, namespace: Namespace, names: tuple[Name, ...], grant: Grant) -> None:
        self.namespace = namespace
        self.names = names
        self._holder = holder
        self._grant: Grant | None = grant

    @property
    def is_valid(self) -> bool:
        """Whether the chunks may be relied on at this moment."""
        grant = self._grant
        return grant is not None and grant.server_session.lease.is_valid(self._holder.now())

    def release(self) -> None:
        """Let go of it; the server is told with the next renewal. Idempotent."""
        self._holder.release(self)


class HeldPins:
    """The pins that a holder was given and has not let go of. To be used under its lock, as their ledgers are."""

    def __init__(self) -> None:
        self._pins: dict[Pin, object] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, pins: Mapping[Pin, object]) -> None:
        """All of them, in a step that no interrupt comes into."""
        self._pins |= pins

    def drop(self, pins: Sequence[Pin]) -> None:
        """These were not given to anybody. Idempotent."""
        for pin in pins:
            self._pins.pop(pin, None)

    def let_go(self, pin: Pin) -> Grant | None:
        """What is to be released; None where it was before."""
        self._pins.pop(pin, None)
        grant, pin._grant = pin._grant, None  # noqa: SLF001 - of one file
        return grant

    def behind(self, new: ServerSession) -> list[tuple[Pin, Grant]]:
        """Those that live under other sessions than this, and what they live by."""
        held = [(pin, grant_of(pin)) for pin in self._pins]
        return [(pin, grant) for pin, grant in held if grant is not None and grant.server_session is not new]

    def move(self, pin: Pin, old: Grant, new: ServerSession, ids: Sequence[bytes | None], ticket: Ticket) -> None:
        """Have it live by what was granted for its names under another session. If that is not one for each it stays with its old
        session, which is needed then; if it was let go of meanwhile, what was granted is released."""
        granted = tuple([each for each in ids if each is not None])
        if grant_of(pin) is not old or len(granted) < len(pin.names):
            new.ledger.release(granted)
            if self._pins.pop(pin, _ABSENT) is not _ABSENT:
                old.server_session.is_needed = True
        else:
            keys = [pin.namespace.key_of(name) for name in pin.names] if len(granted) > 1 else []
            pin._grant = Grant(new, granted, ticket, dict(zip(keys, granted, strict=False)))  # noqa: SLF001 - of one file


def grant_of(pin: Pin) -> Grant | None:
    """What a pin lives by at this moment; None once it is released."""
    return pin._grant  # noqa: SLF001 - of one file


def grouped(pins: Sequence[tuple[Pin, Grant]]) -> Iterator[Sequence[tuple[Pin, Grant]]]:
    """Pins that one request can pin again: some of one namespace."""
    for name in sorted({pin.namespace.name for pin, _ in pins}):
        group = [(pin, grant) for pin, grant in pins if pin.namespace.name == name]
        for start in range(0, len(group), _AT_ONCE):
            yield group[start : start + _AT_ONCE]


def names_of(group: Sequence[tuple[Pin, Grant]]) -> Sequence[Name]:
    """The names of such pins in one form, as one request has them: raw ids are written out where others are."""
    names = [name for pin, _ in group for name in pin.names]
    if any(isinstance(name, str) for name in names):
        return [name if isinstance(name, str) else name.hex() for name in names]
    return names
