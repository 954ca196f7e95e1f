"""Which connections one server takes, in all and of one address, counted from the moment that they are accepted.

A connection has its place before its TLS handshake, so that one that never ends counts like any other. Past the limits a few more
are taken only to be told so; any further one is to be reset.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvobj.api.http.limits import HttpSettings, address_group


@dataclass(frozen=True, slots=True)
class Place:
    """What one connection counts as. `group`: of one address, "" for clients on this machine; `refusal`: why it is not to be
    served, "" where it is."""

    group: str
    refusal: str = ""


class Admission:
    """Counts places. Event-loop-only; who was given a place gives it back once."""

    __slots__ = ("_of_group", "_refused", "_served", "_settings")

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._of_group: dict[str, int] = {}
        self._served = 0
        self._refused = 0

    @property
    def places(self) -> int:
        """How many are taken."""
        return self._served + self._refused

    def admit(self, remote: str, *, is_local: bool) -> Place | None:
        """A place for one more connection from this address, as it is served or only told why not; None: reset it."""
        group = "" if is_local else address_group(remote)
        refusal = self._refusal(group)
        if refusal:
            if self._refused >= self._settings.refused_connections:
                return None
            self._refused += 1
        else:
            self._served += 1
            self._of_group[group] = self._of_group.get(group, 0) + 1
        return Place(group, refusal)

    def leave(self, place: Place) -> None:
        """The connection has ended."""
        if place.refusal:
            self._refused -= 1
            return
        self._served -= 1
        self._of_group[place.group] -= 1
        if not self._of_group[place.group]:
            del self._of_group[place.group]

    def _refusal(self, group: str) -> str:
        settings = self._settings
        if self._served >= settings.connections:
            return "too many connections"
        if group and self._of_group.get(group, 0) >= settings.address_connections:
            return "too many connections of one address"
        return ""
