"""Whether a namespace of a bucket is the same one at its upstream: the same declaration and the same key.

Asked once and remembered for a minute: where chunks have foreign keys, the same key under another declaration is another chunk.
"""

from __future__ import annotations

import logging
from typing import Final

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.clock import Clock
from kvobj.store.places import DEFAULT_NAMESPACE
from kvobj.store.upstream.client import UpstreamClient

_SECONDS: Final = 60.0


class Agreement:
    """Of one upstream. Event loop only."""

    def __init__(self, client: UpstreamClient, *, clock: Clock, log: logging.Logger) -> None:
        self._client = client
        self._clock = clock
        self._log = log
        self._found: dict[str, tuple[bytes, str, float]] = {}

    def known(self, row: NamespaceRow) -> str | None:
        """What differs, "" where nothing does; None: it has to be asked for (`ask`)."""
        if row.name in ("", DEFAULT_NAMESPACE):
            return ""
        root, problem, asked = self._found.get(row.name, (b"", "", 0.0))
        is_fresh = root == row.root and self._clock.monotonic() - asked < _SECONDS
        return problem if is_fresh else None

    @property
    def problems(self) -> dict[str, str]:
        """What differs, by namespace, as it was found last; those that are the same there are not in it."""
        return {name: problem for name, (_, problem, _) in self._found.items() if problem}

    async def ask(self, row: NamespaceRow, *, until: float) -> str:
        """As `known`, after asking the upstream where that is needed. `RemoteFault`."""
        known = self.known(row)
        if known is not None:
            return known
        there = await self._client.namespace(row.name, until=until)
        if there is None:
            problem = "it is not declared there, or not granted to the upstream's user"
        elif there.fingerprint != row.fingerprint:
            problem = "it is declared otherwise there"
        elif there.root != row.root:
            problem = "it has another key there: import it with `kvobj-admin namespace import`"
        else:
            problem = ""
        before = self._found.get(row.name, (b"", "", 0.0))[1]
        self._found[row.name] = (row.root, problem, self._clock.monotonic())
        if problem and problem != before:
            self._log.error("upstream of %s: namespace %s is not used: %s", row.bucket, row.name, problem)
        return problem
