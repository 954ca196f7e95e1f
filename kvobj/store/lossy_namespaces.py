"""Which namespaces may have chunks of which a lossy copy alone is left: those that are lossy, and those that were.

The setting may be taken back, and the copies that were made by then stay. A match looks through its run in these namespaces alone,
so that it costs nothing in all others.
"""

from __future__ import annotations

from typing import Final

from kvobj.catalog.namespace_protocol import NamespaceRow

NOTED_MAX: Final = 100_000
"""Where there are more, every namespace counts as one of them."""


class LossyNamespaces:
    """See the module's text. Of the time before the start it is told by who looks through the catalog then. Event-loop-only."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()

    def note(self, bucket: str, namespace: str) -> None:
        """The namespace is, or was, lossy."""
        if len(self._noted) < NOTED_MAX:
            self._noted.add((bucket, namespace))

    def forget(self, bucket: str, namespace: str) -> None:
        """The namespace is removed with its chunks."""
        self._noted.discard((bucket, namespace))

    def may_be(self, row: NamespaceRow) -> bool:
        """Whether chunks of the namespace may have a lossy copy."""
        return row.lossy or (row.bucket, row.name) in self._noted or len(self._noted) >= NOTED_MAX
