"""What a client on this host may do with a bucket over shared memory, and the grants that say so.

Rights are decided by the request that asks for the grant, with what decides of GETs and PUTs, and again whenever the client renews
it; a connection lives no longer than what was decided last. A descriptor shows a whole region, so what a user may map depends on
what else lies there: all regions are for root and for users that the configuration names, a bucket's own for who owns it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from kvobj.arena import Lane
from kvobj.catalog.rows import BucketRow
from kvobj.clock import Clock
from kvobj.errors import AccessDeniedError, BusyError, NoSuchSessionError
from kvobj.same_host.messages import TOKEN_BYTES
from kvobj.store.chunk_values import Caller

TOKEN_SECONDS: Final = 10.0
PENDING_MAX: Final = 1024
"""Tokens that nobody has used yet: a client that asks and never comes costs others nothing but their place here."""
ID_BYTES: Final = 16

Level = Literal["no", "all", "trusted"]


@dataclass(frozen=True, slots=True)
class Rights:
    """`lane`: the bucket whose regions are all that may be mapped; None: all may. `is_trusted`: writes into the arena itself, and
    is believed not to change what it has committed."""

    bucket: BucketRow
    user_id: str
    is_owner: bool
    lane: Lane | None
    may_write: bool
    is_trusted: bool

    @property
    def caller(self) -> Caller:
        """Who asks, as the store wants it."""
        return Caller(self.user_id, self.is_owner)


@dataclass(frozen=True, slots=True)
class Levels:
    """Who may map what, as the configuration says: `users` by id, and buckets that have regions of their own."""

    users: Mapping[str, Level] = field(default_factory=dict)
    own_buckets: AbstractSet[str] = frozenset()

    def rights(self, bucket: BucketRow, *, user_id: str, is_root: bool, is_owner: bool, may_write: bool) -> Rights:
        """The rights of a user who may read the bucket. `AccessDeniedError`: he may, but over HTTP alone."""
        level = "trusted" if is_root else self.users.get(user_id, "no")
        if level != "no":
            lane, is_trusted = None, level == "trusted"
        elif is_owner and bucket.name in self.own_buckets:
            lane, is_trusted = Lane.of(bucket), False
        else:
            raise AccessDeniedError("the memory is shared with others: use HTTP", bucket=bucket.name, user_id=user_id)
        return Rights(bucket, user_id, is_owner, lane, may_write, is_trusted)


@dataclass(frozen=True, slots=True)
class Granted:
    """What a client is told. The token opens one connection, within `TOKEN_SECONDS`; the lease begins when this was asked for."""

    socket: str
    id: bytes
    token: bytes = field(repr=False)
    lease_ms: int
    may_write: bool
    is_trusted: bool


class Granting(Protocol):
    """Where grants come from: `Grants`, or another process's."""

    async def grant(self, rights: Rights) -> Granted:
        """A new grant."""
        ...

    async def renew(self, grant_id: bytes, rights: Rights) -> int:
        """Let a connection go on, by what was decided now; its lease in milliseconds. `NoSuchSessionError`."""
        ...


class Grant:
    """One grant, from the answer to the end of its connection. `deadline`: until when the rights hold, by the monotonic clock."""

    __slots__ = ("deadline", "id", "rights")

    def __init__(self, grant_id: bytes, rights: Rights, deadline: float) -> None:
        self.id = grant_id
        self.rights = rights
        self.deadline = deadline


class Grants:
    """Implements `Granting`. Event-loop-only. `margin_seconds`: by how much a connection outlives its lease."""

    def __init__(self, *, socket: str, lease_ms: int, margin_seconds: float, clock: Clock) -> None:
        self._socket = socket
        self._lease_ms = lease_ms
        self._margin_seconds = margin_seconds
        self._clock = clock
        self._pending: dict[bytes, tuple[Grant, float]] = {}
        self._open: dict[bytes, Grant] = {}

    async def grant(self, rights: Rights) -> Granted:
        """See `Granting`. `BusyError` where too many tokens are out."""
        now = self._clock.monotonic()
        for token in [token for token, (_, until) in self._pending.items() if until <= now]:
            del self._pending[token]
        if len(self._pending) >= PENDING_MAX:
            raise BusyError("too many same-host grants are not used yet", limit=PENDING_MAX)
        grant = Grant(secrets.token_bytes(ID_BYTES), rights, self._deadline(now))
        token = secrets.token_bytes(TOKEN_BYTES)
        self._pending[token] = (grant, now + TOKEN_SECONDS)
        return Granted(self._socket, grant.id, token, self._lease_ms, rights.may_write, rights.is_trusted)

    async def renew(self, grant_id: bytes, rights: Rights) -> int:
        """See `Granting`. The bucket and the user have to be those of the grant."""
        grant = self._open.get(grant_id)
        if grant is None or (grant.rights.user_id, grant.rights.bucket.name) != (rights.user_id, rights.bucket.name):
            raise NoSuchSessionError("no such same-host connection")
        if (rights.lane, rights.is_trusted) != (grant.rights.lane, grant.rights.is_trusted):
            raise NoSuchSessionError("the rights are others: connect again")
        grant.rights = rights
        grant.deadline = self._deadline(self._clock.monotonic())
        return self._lease_ms

    def claim(self, token: bytes) -> Grant | None:
        """The grant of a token that is good now; the token is used up. None for any other."""
        found = self._pending.pop(token, None)
        if found is None:
            return None
        grant, until = found
        if self._clock.monotonic() >= until:
            return None
        self._open[grant.id] = grant
        return grant

    def end(self, grant: Grant) -> None:
        """The connection of a grant is gone."""
        self._open.pop(grant.id, None)

    def is_over(self, grant: Grant) -> bool:
        """Whether the lease and its margin have run out."""
        return self._clock.monotonic() >= grant.deadline

    def _deadline(self, now: float) -> float:
        return now + self._lease_ms / 1000 + self._margin_seconds
