"""The nvme tier: O_DIRECT segment files for frames, LMDB for their directory and for small frames."""

from __future__ import annotations

from kvobj.tiers.nvme.directory import NVME_TABLES
from kvobj.tiers.nvme.rebuild import RebuiltBlob, live_inline_entries, rebuild_directory, restore_inline
from kvobj.tiers.nvme.record import RECORD_KEY_BYTES
from kvobj.tiers.nvme.space import SegmentStatus
from kvobj.tiers.nvme.tier import KERNEL, NvmeTier, NvmeTimeouts

__all__ = [
    "KERNEL",
    "NVME_TABLES",
    "RECORD_KEY_BYTES",
    "NvmeTier",
    "NvmeTimeouts",
    "RebuiltBlob",
    "SegmentStatus",
    "live_inline_entries",
    "rebuild_directory",
    "restore_inline",
]
