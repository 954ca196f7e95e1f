"""What a cache tier drops first. Pure: policies know names, sizes and order, never bytes."""

from kvobj.policy.choose import chunk_policy
from kvobj.policy.chunk_policy import CacheTier, ChunkPolicy, chunk_name
from kvobj.policy.dram_view import DramView
from kvobj.policy.gipe import GipePolicy
from kvobj.policy.lru import LruPolicy
from kvobj.policy.lru_chunks import LruChunks
from kvobj.policy.protocol import EvictionPolicy

__all__ = [
    "CacheTier",
    "ChunkPolicy",
    "DramView",
    "EvictionPolicy",
    "GipePolicy",
    "LruChunks",
    "LruPolicy",
    "chunk_name",
    "chunk_policy",
]
