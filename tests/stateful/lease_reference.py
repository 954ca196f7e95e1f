"""What the catalog of chunks must answer, said once more and as plainly as can be: dicts, sets, and loops over all keys.

Shares nothing with the drivers. One bucket of chunks; rows of class `memory` lie in a dict over the durable ones. Every verb is one
step and returns what is compared: values, or the name of the error. Times are boot milliseconds; wall time means nothing here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

LATE_MS = 500
QUIET_EXTRA_MS = 1000
TOKENS = 16


@dataclass(frozen=True, slots=True)
class Version:
    """One commit of a key. `parent` as in rows: a key, "" or None."""

    key: str
    blob: bytes
    parent: str | None
    size_bytes: int = 100
    in_memory: bool = False
    owner: str = "main"
    hidden: bool = False
    depth: int = 0


@dataclass(slots=True)
class Pin:
    """A pin: whose it is, and what it protects: its targets, and everything above them as it was then."""

    session: bytes
    targets: tuple[tuple[str, bytes], ...]
    above: tuple[tuple[str, bytes], ...]
    grant: int


@dataclass(slots=True)
class Session:
    ttl_ms: int
    expires_ms: int
    grant: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """An entry of the delete queue. `held_by`: the blob that must not be pinned, b"" if it need not wait."""

    blob: bytes
    volatile: bool
    held_by: bytes = b""


@dataclass(slots=True)
class Reference:
    """See the module's text."""

    epoch: bytes = b""
    durable: dict[str, Version] = field(default_factory=dict)
    volatile: dict[str, Version] = field(default_factory=dict)
    marks: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    queue: list[Waiting] = field(default_factory=list)
    sessions: dict[bytes, Session] = field(default_factory=dict)
    pins: dict[bytes, Pin] = field(default_factory=dict)
    marked_ttl_ms: int = 0
    alive_ms: int | None = None
    quiet_until_ms: int | None = None
    decided: list[bool] | None = None
    """Which chunks a condemnation has found that may go, between that and their marks."""
    looked: list[list[str]] = field(default_factory=list)
    """The hidden keys that claims have found and not gone on with, in their order."""
    spared: frozenset[str] = frozenset()
    """Keys that a claim leaves although they are marked: a pin or a child's commit beside it counts on them, also in vain."""
    bytes_gone: set[bytes] = field(default_factory=set)
    """Blobs that all tiers have lost: nobody can write them down."""
    absent: frozenset[str] = frozenset()
    """Keys that a claim has in hand: a look-up or a match beside it may miss them, also where the claim leaves them in the end."""

    def copy(self) -> Reference:
        return copy.deepcopy(self)

    # -- questions -------------------------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        return self.quiet_until_ms is not None

    def top(self, key: str) -> Version | None:
        return self.volatile.get(key) or self.durable.get(key)

    def live(self, key: str) -> Version | None:
        row = self.top(key)
        return row if row is not None and not row.hidden else None

    def found(self, key: str) -> Version | None:
        """What a look-up finds."""
        return None if key in self.absent else self.live(key)

    def keys(self) -> set[str]:
        return {*self.durable, *self.volatile}

    def children(self, key: str) -> list[str]:
        rows = [*self.durable.values(), *self.volatile.values()]
        return sorted({row.key for row in rows if row.parent == key}) if key else []

    def holds_key(self, key: str) -> bool:
        return self.quiet or any(key == target for pin in self.pins.values() for target, _ in pin.targets)

    def holds_blob(self, blob: bytes) -> bool:
        return self.quiet or any(blob == target for pin in self.pins.values() for _, target in pin.targets)

    def due(self) -> list[Waiting]:
        return sorted(each for each in self.queue if not (each.held_by and self.holds_blob(each.held_by)))

    def blobs(self) -> set[bytes]:
        """What rows name, hidden and shadowed ones too."""
        return {row.blob for row in (*self.durable.values(), *self.volatile.values())}

    def usage(self) -> tuple[int, int]:
        rows = [row for key in self.keys() if (row := self.live(key)) is not None]
        return len(rows), sum(row.size_bytes for row in rows)

    def run_of(self, keys: Sequence[str]) -> list[Version]:
        """The longest run at the head of a list, one by one."""
        run: list[Version] = []
        for at, key in enumerate(keys):
            row = self.found(key)
            if row is None or (row.parent is not None and row.parent != (keys[at - 1] if at else "")):
                break
            run.append(row)
        return run

    # -- rows ------------------------------------------------------------------------------------------------------

    def commit(self, given: Version, *, replaces: bool = False) -> tuple[str, bytes]:
        """("stored" or "existed", the live blob), or (the error's name, b"")."""
        self._unmark(given.key, given.parent)
        live = self.live(given.key)
        error = self._refusal(given, live, replaces=replaces)
        if error or (live is not None and not replaces):
            if given.blob not in self.blobs_of(given.key):
                self.queue.append(Waiting(given.blob, given.in_memory))
            return (error, b"") if error or live is None else ("existed", live.blob)
        parent = self.live(given.parent) if given.parent else None
        stored = replace(given, depth=0 if parent is None else parent.depth + 1)
        below = self.durable.get(given.key)
        if not given.in_memory:
            self._become(given.key, None, stored)
        elif below is None or below.hidden or (live is None):
            self._become(given.key, stored, None)
        else:
            self._become(given.key, stored, below)
        return "stored", given.blob

    def blobs_of(self, key: str) -> set[bytes]:
        return {row.blob for row in (self.durable.get(key), self.volatile.get(key)) if row is not None}

    def _refusal(self, given: Version, live: Version | None, *, replaces: bool) -> str:
        if given.blob[:8] != self.epoch:
            return "FencedError"
        if replaces and live is None:
            return "NoSuchKeyError"
        if live is not None and replaces and (live.parent != given.parent or self.children(given.key)):
            return "ImmutableChunkError"
        if live is not None and not replaces:
            return "" if live.size_bytes == given.size_bytes else "ImmutableChunkError"
        return "ParentNotFoundError" if given.parent and self.live(given.parent) is None else ""

    def _become(self, key: str, above: Version | None, below: Version | None, *, may_wait: bool = True) -> None:
        """Make the two rows of a key these, and queue what is not named any more."""
        kept = {row.blob for row in (above, below) if row is not None}
        for rows, volatile in ((self.durable, False), (self.volatile, True)):
            row = rows.pop(key, None)
            if row is not None and row.blob not in kept:
                kept.add(row.blob)
                waits = may_wait and self.holds_blob(row.blob)
                self.queue.append(Waiting(row.blob, volatile, row.blob if waits else b""))
        if above is not None:
            self.volatile[key] = above
        if below is not None:
            self.durable[key] = below

    def hide(self, key: str, *, lost: bytes | None = None, unpinned: bool = False) -> tuple[bytes, frozenset[bytes]]:
        """DELETE, recall, loss: (the blob of the key's row that went or b"", those of descendants)."""
        live = self.live(key)
        if live is None or (lost is not None and live.blob != lost):
            return b"", frozenset()
        gone: dict[str, bytes] = {}
        for each in self._below(key):
            row = self.live(each)
            if row is None:
                continue
            ignores_pins = unpinned or (each == key and lost is not None)
            if self.children(each) or (not ignores_pins and self.holds_key(each)):
                stays = replace(row, hidden=True)
                self._become(each, *((stays, None) if each in self.volatile else (None, stays)))
            else:
                self._become(each, None, None, may_wait=False)
            gone[each] = row.blob
            self._unmark(each)
        return gone.pop(key), frozenset(gone.values())

    def _below(self, key: str) -> list[str]:
        """The key and all that hangs on it, children first."""
        return [each for child in self.children(key) for each in self._below(child)] + [key]

    def recall(self, owner: str) -> frozenset[bytes]:
        gone: set[bytes] = set()
        for key in sorted(self.keys()):
            row = self.live(key)
            if row is not None and row.owner == owner:
                blob, others = self.hide(key)
                gone |= {blob, *others}
        return frozenset(gone)

    def raise_durability(self, given: Version) -> bool:
        row = self.top(given.key)
        if row is None or row.blob != given.blob or given.blob in self.bytes_gone:
            return False
        self._become(given.key, None, replace(row, in_memory=False))
        return True

    # -- policy ----------------------------------------------------------------------------------------------------

    def _unmark(self, *keys: str | None) -> None:
        for key in keys:
            self.marks.pop(key or "", None)

    def rescue(self, keys: Iterable[str]) -> None:
        self._unmark(*keys)

    def condemn(self, chunks: Sequence[tuple[str, bytes]], *, due_ms: int) -> list[bool]:
        allowed = self.may_condemn(chunks)
        self.mark([chunk for chunk, may in zip(chunks, allowed, strict=True) if may], due_ms=due_ms)
        return allowed

    def may_condemn(self, chunks: Sequence[tuple[str, bytes]]) -> list[bool]:
        marked = set(self.marks)
        allowed: list[bool] = []
        for key, blob in chunks:
            row = self.live(key)
            may = row is not None and row.blob == blob and not self.holds_key(key)
            may = may and marked.issuperset(self.children(key))
            if may:
                marked.add(key)
            allowed.append(may)
        return allowed

    def mark(self, chunks: Sequence[tuple[str, bytes]], *, due_ms: int) -> None:
        """Whatever has become of the chunks since they were looked at."""
        for key, blob in chunks:
            if self.marks.get(key, (b"", 0))[0] != blob:
                self._unmark(key)
                self.marks[key] = (blob, due_ms)

    def look(self) -> list[str]:
        """Hidden keys that nobody holds, children before parents."""
        hidden = [row for key in self.keys() if (row := self.top(key)) is not None and row.hidden]
        hidden = [row for row in hidden if not self.holds_key(row.key)]
        return [row.key for row in sorted(hidden, key=lambda row: -row.depth)]

    def claim(self, *, now_ms: int) -> frozenset[bytes]:
        """The blobs of the rows that went. What was hidden after this claim has looked is left to the next."""
        hidden = self.looked.pop(0) if self.looked else self.look()
        if self.quiet:
            return frozenset()
        due = [(key, blob) for key, (blob, due_ms) in self.marks.items() if due_ms <= now_ms]
        self._unmark(*(key for key, _ in due))
        gone: set[bytes] = set()
        for key, blob in [*(chunk for chunk in due if chunk[0] not in self.spared), *((key, b"") for key in hidden)]:
            row = self.top(key)
            if row is None or row.hidden != (not blob) or (blob and row.blob != blob):
                continue
            if not self.children(key) and not self.holds_key(key):
                gone.add(row.blob)
                self._become(key, None, None, may_wait=False)
        return frozenset(gone)

    def condemned(self) -> tuple[int, int]:
        return len(self.marks), sum(row.hidden for row in (*self.durable.values(), *self.volatile.values()))

    def queue_leftovers(self, blobs: Iterable[bytes]) -> None:
        for blob in blobs:
            self.queue.append(Waiting(blob, volatile=False, held_by=blob if self.holds_blob(blob) else b""))

    def reap(self, blobs: Iterable[bytes]) -> None:
        gone = set(blobs)
        self.queue = [each for each in self.queue if each.blob not in gone]

    # -- leases ----------------------------------------------------------------------------------------------------

    def open_session(self, session: bytes, *, ttl_ms: int, now_ms: int) -> None:
        self.sessions[session] = Session(ttl_ms, now_ms + ttl_ms)
        self.marked_ttl_ms = max(self.marked_ttl_ms, ttl_ms)

    def living(self, session: bytes, *, now_ms: int) -> str:
        """The name of the error for a session that may not be used, or ""."""
        if session not in self.sessions:
            return "NoSuchSessionError"
        return "SessionExpiredError" if now_ms > self.sessions[session].expires_ms else ""

    def pin(self, session: bytes, pin: bytes, rows: Sequence[Version], grant: int) -> None:
        targets = tuple((row.key, row.blob) for row in rows)
        above = {(up.key, up.blob) for row in rows for up in self._above(row)}
        self.pins[pin] = Pin(session, targets, tuple(sorted(above - set(targets))), grant)

    def _above(self, row: Version) -> list[Version]:
        found: list[Version] = []
        at: Version | None = row
        while at is not None and at.parent:
            at = self.top(at.parent)
            if at is not None:
                found.append(at)
        return found

    def targets_of(self, run: Sequence[Version]) -> list[Version]:
        """What must be pinned to protect a run: each element that the next one is no child of."""
        return [row for at, row in enumerate(run) if at + 1 == len(run) or not run[at + 1].parent]

    def release(self, session: bytes, pins: Iterable[bytes]) -> None:
        for pin in pins:
            if pin in self.pins and self.pins[pin].session == session:
                del self.pins[pin]

    def held_by(self, session: bytes, *, as_of: int) -> set[bytes]:
        return {pin for pin, row in self.pins.items() if row.session == session and row.grant <= as_of}

    def end_session(self, session: bytes) -> None:
        del self.sessions[session]
        self.pins = {pin: row for pin, row in self.pins.items() if row.session != session}

    def beat(self, *, now_ms: int) -> int:
        """What the expiry worker does: how many sessions ended."""
        self.alive_ms = now_ms
        over = [name for name, session in self.sessions.items() if session.expires_ms + LATE_MS <= now_ms]
        for session in over:
            self.end_session(session)
        if self.quiet_until_ms is not None and now_ms >= self.quiet_until_ms:
            self.quiet_until_ms = None
        return len(over)

    # -- starts ----------------------------------------------------------------------------------------------------

    def restart(self, *, now_ms: int) -> None:
        """The process is another, everything else is kept; who could not renew is given the time. Quiet time goes on."""
        self.marks.clear()
        away_ms = now_ms - (now_ms if self.alive_ms is None else self.alive_ms)
        for session in self.sessions.values():
            session.expires_ms += min(max(0, away_ms), session.ttl_ms)
        self.alive_ms = now_ms
        if self.quiet_until_ms is not None and now_ms >= self.quiet_until_ms:
            self.quiet_until_ms = None

    def lose_volatile(self, *, now_ms: int) -> None:
        """Everything volatile is gone, another boot's clock runs; what has lost its parent goes too."""
        self.marks.clear()
        self.volatile.clear()
        self.sessions.clear()
        self.pins.clear()
        self.queue = [each for each in self.queue if not each.volatile]
        self.alive_ms = now_ms
        self.quiet_until_ms = now_ms + self.marked_ttl_ms + QUIET_EXTRA_MS if self.marked_ttl_ms else None
        for key in sorted(self.durable):
            row = self.live(key)
            if row is not None and row.parent and self.top(row.parent) is None:
                self.hide(key, unpinned=True)
