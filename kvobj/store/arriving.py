"""Which keys are being written at this moment: for who asks why a chunk is not there yet. Event-loop-only."""

from __future__ import annotations

from kvobj.tiers.protocol import BlobNames


class ArrivingKeys:
    """Counts writes under way by bucket and key: several writers may bring one chunk."""

    __slots__ = ("_writes",)

    def __init__(self) -> None:
        self._writes: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        """How many keys are being written."""
        return len(self._writes)

    def begin(self, names: BlobNames) -> None:
        """A write has room and waits for its bytes; matched by one `end`."""
        name = (names.bucket, names.key)
        self._writes[name] = self._writes.get(name, 0) + 1

    def end(self, names: BlobNames) -> None:
        """The write was committed, or has left nothing."""
        name = (names.bucket, names.key)
        left = self._writes[name] - 1
        if left:
            self._writes[name] = left
        else:
            del self._writes[name]

    def is_arriving(self, bucket: str, key: str) -> bool:
        """Whether somebody is writing the key."""
        return (bucket, key) in self._writes
