"""The process's limit of open files (RLIMIT_NOFILE), raised so that the limits of connections are the ones that count.

The usual soft limit of 1,024 is reached before `[limits] connections` is: then nothing can be accepted and no segment opened,
where the connections' own limit answers 503 to those who are too many. Clients in their TLS handshake come on top.
"""

from __future__ import annotations

import logging
import resource

from kvobj.config.settings import LimitSettings

_WANTED_FILES = 65_536
_OWN_FILES = 512
"""Listening sockets, the catalog's environments, the record log, segments of the nvme tier, mappings, and room."""


_FILES_OF_A_WORKER = 3
"""Its listening socket, which all others inherit too, and in the store process the pair of sockets and what tells of its end."""


def allow_open_files(limits: LimitSettings, log: logging.Logger, *, workers: int = 1) -> None:
    """Raise the soft limit to 65,536, or more where needed, as far as the hard one lets it; a warning where that is too little.
    Never lowers it. Worker processes inherit it: each process has connections of one port then, and one process those of both."""
    ports, where = 2, "each of two ports"
    if workers > 1:
        ports, where = 1, f"the admin port, or on that of {workers} workers,"
    needed = ports * limits.connections + _OWN_FILES + (_FILES_OF_A_WORKER * (workers + 1) if workers > 1 else 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(needed, _WANTED_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "the limit of open files is %d, %d connections on %s may need %d",
            allowed,
            limits.connections,
            where,
            needed,
        )
