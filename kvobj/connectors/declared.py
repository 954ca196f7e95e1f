"""Whether a namespace that somebody else has declared is the one that an engine would have declared. Pure.

A server completes what it is given, so a standing declaration has fields that the engine's does not name: they have to say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SETTINGS: Final = frozenset({"codecs", "lossy", "access", "quota", "profile"})
"""What stands in a declaration beside it, and may be changed: no part of what chunks are."""
_SAYS_NOTHING: Final[Mapping[str, object]] = {"salt": "", "rank": {"tensor": [0, 1], "pipeline": [0, 1]}}
"""Fields whose value is another than None where nothing was declared."""


def differing(standing: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names of the fields in which a standing declaration, as a server tells it, is not the wanted one; sorted.

    Of a table that is wanted only what it names is compared: a server completes layouts from their kinds."""
    names = {*standing, *wanted} - _SETTINGS
    return sorted(name for name in names if not _agrees(standing.get(name), wanted.get(name), _SAYS_NOTHING.get(name)))


def _agrees(standing: object, wanted: object, nothing: object) -> bool:
    if wanted is None:
        return standing is None or standing == nothing
    if isinstance(wanted, Mapping):
        return isinstance(standing, Mapping) and all(
            _agrees(standing.get(name), value, None) for name, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return isinstance(standing, list | tuple) and list(standing) == list(wanted)
    return standing == wanted
