"""Which objects of ordinary buckets have a copy in nvme that may leave it, in the order of their use. Only where there is a remote.

Those of class `shared` may go as they are; those of class `local` once they were uploaded, where their bucket's rule is `evicted`
or `always`. About 300 B an object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from kvobj.catalog.rows import Durability, ObjectRow

SCAN_MAX: Final = 10_000
"""How many objects one call looks at."""

ObjectName = tuple[str, str]
"""Bucket and key."""


class HomeObject(NamedTuple):
    """One object. `blob_id` is its row's first blob: of another row under the name it is another."""

    bucket: str
    key: str
    blob_id: bytes
    size_bytes: int


class HomeObjects:
    """See the module's text. Event-loop-only; every call but those that name victims is O(1)."""

    def __init__(self) -> None:
        self._shared: OrderedDict[ObjectName, HomeObject] = OrderedDict()
        self._local: OrderedDict[ObjectName, HomeObject] = OrderedDict()
        self.shared_bytes = 0

    def __len__(self) -> int:
        """How many are known."""
        return len(self._shared) + len(self._local)

    def add(self, row: ObjectRow) -> None:
        """The row's bytes are in nvme; it counts as used now."""
        self.drop((row.bucket, row.key))
        found = HomeObject(row.bucket, row.key, row.blobs[0].blob_id, row.size_bytes)
        if row.durability is Durability.SHARED:
            self._shared[row.bucket, row.key] = found
            self.shared_bytes += found.size_bytes
        else:
            self._local[row.bucket, row.key] = found

    def shared(self, row: ObjectRow) -> None:
        """The row is of class `shared` now. Its place in the order of use is what it was only if it was used last of all."""
        name = (row.bucket, row.key)
        before = self._local.get(name)
        if before is None or before.blob_id == row.blobs[0].blob_id:
            self.add(row)

    def used(self, name: ObjectName) -> None:
        """The object was read."""
        for objects in (self._shared, self._local):
            if name in objects:
                objects.move_to_end(name)

    def drop(self, name: ObjectName, blob_id: bytes | None = None) -> None:
        """The object is gone, or has left nvme. `blob_id`: only where it is this one."""
        for objects in (self._shared, self._local):
            found = objects.get(name)
            if found is not None and blob_id in (None, found.blob_id):
                del objects[name]
                if objects is self._shared:
                    self.shared_bytes -= found.size_bytes

    def evictable(self, wanted_bytes: int, limit: int) -> list[HomeObject]:
        """Objects of class `shared`, least recently used first, of so many bytes together if there are."""
        return _first(self._shared, wanted_bytes, limit, lambda _: True)

    def uploadable(self, wanted_bytes: int, limit: int, *, eligible: Callable[[HomeObject], bool]) -> list[HomeObject]:
        """Objects of class `local`, likewise."""
        return _first(self._local, wanted_bytes, limit, eligible)


def _first(
    objects: OrderedDict[ObjectName, HomeObject],
    wanted_bytes: int,
    limit: int,
    eligible: Callable[[HomeObject], bool],
) -> list[HomeObject]:
    found: list[HomeObject] = []
    found_bytes = 0
    for looked_at, each in enumerate(objects.values()):
        if found_bytes >= wanted_bytes or len(found) == limit or looked_at == SCAN_MAX:
            break
        if eligible(each):
            found.append(each)
            found_bytes += each.size_bytes
    return found
