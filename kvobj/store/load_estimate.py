"""How long reading chunks is thought to take, from the tiers they lie in: a hint for whoever weighs loading against computing.

Constants and no measurement of the present load: one local client with one connection was seen to get so much (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BYTES_PER_SECOND: Final[Mapping[str, float]] = {"dram": 2.5e9, "nvme": 1.0e9}
_SLOWEST: Final = min(BYTES_PER_SECOND.values())


def expected_load_ms(size_bytes_by_tier: Mapping[str, int]) -> int:
    """Milliseconds, rounded up; a tier that is not known counts as the slowest."""
    seconds = sum(size_bytes / BYTES_PER_SECOND.get(tier, _SLOWEST) for tier, size_bytes in size_bytes_by_tier.items())
    return -int(-seconds * 1000 // 1)
