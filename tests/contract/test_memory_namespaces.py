"""The reference driver's namespaces pass the contract."""

from __future__ import annotations

from collections import defaultdict

import pytest
from namespace_contract import BUCKET, MADE_MS, OTHER, NamespaceContract, NamespacePlace

from kvobj.catalog.memory_namespaces import MemoryNamespaces
from kvobj.catalog.namespace_protocol import Namespaces, NamespaceUsage
from kvobj.errors import NoSuchBucketError


class MemoryPlace:
    def __init__(self) -> None:
        self.buckets = {BUCKET, OTHER}
        self.usage: defaultdict[tuple[str, str], NamespaceUsage] = defaultdict(lambda: NamespaceUsage(0, 0))
        self._namespaces = MemoryNamespaces(self._require_bucket, lambda *place: self.usage[place])
        self.namespaces: Namespaces = self._namespaces

    def _require_bucket(self, bucket: str, made_ms: int | None) -> None:
        if bucket not in self.buckets or made_ms not in (None, MADE_MS):
            raise NoSuchBucketError("no such bucket", bucket=bucket)

    async def create_bucket(self, bucket: str) -> None:
        self.buckets.add(bucket)

    async def delete_bucket(self, bucket: str) -> None:
        self.buckets.remove(bucket)
        self.namespaces.forget_bucket(bucket)

    async def store(self, bucket: str, name: str, *, chunks: int, size_bytes: int) -> None:
        before = self.usage[bucket, name]
        self.usage[bucket, name] = NamespaceUsage(before.chunks + chunks, before.size_bytes + size_bytes)


class TestMemoryNamespaces(NamespaceContract):
    @pytest.fixture
    def place(self) -> NamespacePlace:
        return MemoryPlace()
