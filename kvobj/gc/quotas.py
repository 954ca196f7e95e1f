"""Which namespaces have come to their quota, and by how much they are trimmed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind
from kvobj.errors import NoSuchBucketError

# Trimmed from the first share of the quota down to the second, so that the namespace's next PUT is not refused.
HIGH_SHARE: Final = 0.98
LOW_SHARE: Final = 0.95

Place = tuple[str, str]
"""Bucket and namespace."""


@dataclass(slots=True)
class Excess:
    """What one namespace has too much of; who takes from it counts it down."""

    place: Place
    chunks: int
    size_bytes: int

    def take(self, *, chunks: int, size_bytes: int) -> None:
        """So much of it is on its way out."""
        self.chunks -= chunks
        self.size_bytes -= size_bytes

    @property
    def is_left(self) -> bool:
        """Whether there is still too much."""
        return self.chunks > 0 or self.size_bytes > 0


async def over_quota(catalog: Catalog, leaving: Mapping[Place, tuple[int, int]]) -> list[Excess]:
    """Every namespace at its quota. `leaving`: (chunks, bytes) of a namespace that are condemned already."""
    found: list[Excess] = []
    for bucket in await catalog.buckets():
        if bucket.kind is BucketKind.KV:
            try:
                found += await _of_bucket(catalog, bucket.name, leaving)
            except NoSuchBucketError:  # deleted since it was listed
                continue
    return found


async def _of_bucket(catalog: Catalog, bucket: str, leaving: Mapping[Place, tuple[int, int]]) -> list[Excess]:
    found: list[Excess] = []
    after = ""
    while page := await catalog.namespaces.page(bucket, after=after):
        for row in page:
            excess = await _excess_of(catalog, row, leaving.get((bucket, row.name), (0, 0)))
            if excess.is_left:
                found.append(excess)
        after = page[-1].name
    return found


async def _excess_of(catalog: Catalog, row: NamespaceRow, leaving: tuple[int, int]) -> Excess:
    place = (row.bucket, row.name)
    if row.quota.chunks is None and row.quota.size_bytes is None:
        return Excess(place, 0, 0)
    usage = await catalog.namespaces.usage(row.bucket, row.name)
    return Excess(
        place,
        _above(row.quota.chunks, usage.chunks - leaving[0]),
        _above(row.quota.size_bytes, usage.size_bytes - leaving[1]),
    )


def _above(quota: int | None, used: int) -> int:
    if quota is None or used < HIGH_SHARE * quota:
        return 0
    return used - int(LOW_SHARE * quota)
