"""Every chunk policy keeps the contract."""

from __future__ import annotations

import pytest
from policy_contract import DRAM, NVME, SIZE, ChunkPolicyContract

from kvobj.native import library
from kvobj.policy import ChunkPolicy, GipePolicy, LruChunks, chunk_policy

CAPACITIES = {DRAM: 100 * SIZE, NVME: 100 * SIZE}


class TestNativeGipe(ChunkPolicyContract):
    @pytest.fixture
    def policy(self) -> ChunkPolicy:
        assert library() is not None, "make native"
        return GipePolicy(CAPACITIES)


class TestPurePythonGipe(ChunkPolicyContract):
    @pytest.fixture
    def policy(self) -> ChunkPolicy:
        return GipePolicy(CAPACITIES, use_native=False)


class TestLruChunks(ChunkPolicyContract):
    @pytest.fixture
    def policy(self) -> ChunkPolicy:
        return LruChunks(CAPACITIES)


def test_the_configuration_names_the_policy() -> None:
    assert isinstance(chunk_policy("gipe", CAPACITIES, history=16, write_margin=1.1), GipePolicy)
    assert isinstance(chunk_policy("lru", CAPACITIES, history=16, write_margin=1.1), LruChunks)
