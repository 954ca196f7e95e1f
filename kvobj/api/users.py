"""Access key → user, from a copy of the catalog's users that is at most a second old.

Guarantees that a user who was removed is refused within `REFRESH_SECONDS`, and that one who was added is found at once
(an unknown key refreshes the copy, at most every `UNKNOWN_REFRESH_SECONDS`, so that a flood of bad keys costs little).
"""

from __future__ import annotations

from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import UserRow
from kvobj.clock import Clock

REFRESH_SECONDS: Final = 1.0
UNKNOWN_REFRESH_SECONDS: Final = 0.05


class UserDirectory:
    """Read-only view of the users. Event-loop-only; concurrent refreshes are harmless."""

    def __init__(self, catalog: Catalog, clock: Clock) -> None:
        self._catalog = catalog
        self._clock = clock
        self._read_at = float("-inf")
        self._by_access_key: dict[str, UserRow] = {}
        self._by_id: dict[str, UserRow] = {}

    def fresh(self, access_key: str) -> UserRow | None:
        """The user, where the copy is fresh and has it; None: ask `with_access_key`."""
        if self._clock.monotonic() - self._read_at >= REFRESH_SECONDS:
            return None
        return self._by_access_key.get(access_key)

    async def with_access_key(self, access_key: str) -> UserRow | None:
        """The user, or None. `UnavailableError` where the catalog cannot be read."""
        await self._freshen(is_known=access_key in self._by_access_key)
        return self._by_access_key.get(access_key)

    async def with_id(self, user_id: str) -> UserRow | None:
        """The user of this id, or None; as fresh as `with_access_key`."""
        await self._freshen(is_known=user_id in self._by_id)
        return self._by_id.get(user_id)

    async def freshen(self) -> None:
        """Make the copy at most `REFRESH_SECONDS` old: before `display_name`, where no signature was looked up."""
        await self._freshen(is_known=True)

    def display_name(self, user_id: str) -> str:
        """What listings call the user; the id itself where the user is gone."""
        user = self._by_id.get(user_id)
        return user_id if user is None else user.display_name

    async def _freshen(self, *, is_known: bool) -> None:
        age_seconds = self._clock.monotonic() - self._read_at
        if age_seconds >= REFRESH_SECONDS or (not is_known and age_seconds >= UNKNOWN_REFRESH_SECONDS):
            await self._refresh()

    async def _refresh(self) -> None:
        users = await self._catalog.users()
        self._by_access_key = {user.access_key: user for user in users}
        self._by_id = {user.id: user for user in users}
        self._read_at = self._clock.monotonic()
