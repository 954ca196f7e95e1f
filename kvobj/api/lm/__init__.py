"""`lm://`: LMCache's own wire protocol on the same store, for deployments of `lmcache_server` (docs/engines/lm-protocol.md)."""

from kvobj.api.lm.commands import LmCommands
from kvobj.api.lm.server import LmLimits, LmServer

__all__ = ["LmCommands", "LmLimits", "LmServer"]
