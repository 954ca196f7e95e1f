"""The reference driver's namespaces pass the contract."""

from __future__ import annotations

from collections import defaultdict

import pytest
from namespace_contract import BUCKET, OTHER, NamespaceContract, NamespacePlace

from kvobj.catalog.memory_namespaces import MemoryNamespaces
from kvobj.catalog.namespace_protocol import Namespaces, NamespaceUsage


class MemoryPlace:
    def __init__(self) -> None:
        self.buckets = {BUCKET, OTHER}
        self.usage: defaultdict[tuple[str, str], NamespaceUsage] = defaultdict(lambda: NamespaceUsage(0, 0))
        self._namespaces = MemoryNamespaces(self.buckets.__contains__, lambda *place: self.usage[place])
        self.namespaces: Namespaces = self._namespaces

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
