"""What a cache tier drops first. Pure: policies know ids, sizes and order, never bytes."""

from kvobj.policy.lru import LruPolicy
from kvobj.policy.protocol import EvictionPolicy

__all__ = ["EvictionPolicy", "LruPolicy"]
