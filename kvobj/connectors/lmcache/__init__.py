"""LMCache 0.5: `KvobjL2Adapter` for its multi-process server, `KvobjConnectorAdapter` for the connector inside an engine.

Each is imported when it is asked for: of LMCache's two halves one may stand without what the other needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

_HOMES: Final = {
    "KvobjL2Adapter": "kvobj.connectors.lmcache.l2_adapter",
    "KvobjConnector": "kvobj.connectors.lmcache.remote_connector",
    "KvobjConnectorAdapter": "kvobj.connectors.lmcache.remote_connector",
}

__all__ = ["KvobjConnector", "KvobjConnectorAdapter", "KvobjL2Adapter"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the module has
    """LMCache looks its classes up by name, others that it only hopes for too."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
