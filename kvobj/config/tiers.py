"""Reads `[[tiers]]`: one dram tier, then one nvme tier, which is home.

Bodies are received into the arena that the dram tier holds, and durability rests on the last tier, so neither can be left out here.
Kinds of later versions are known by name, so that a configuration ahead of its server is told so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvobj.config.settings import DramSettings, NvmeSettings
from kvobj.config.table_reader import TableReader

_MIB: Final = 2**20
_TIB: Final = 2**40
_AVAILABLE: Final = ("dram", "nvme")
_LATER: Final = ("hbm", "remote")
_WATERMARK_LOW: Final = 0.1
_WATERMARK_HIGH: Final = 0.99


def read_tiers(readers: list[TableReader] | None, problems: list[str]) -> tuple[DramSettings, NvmeSettings]:
    """Settings of both tiers. None: nothing was written down, both are sized by the machine."""
    dram, nvme = DramSettings(), NvmeSettings()
    if readers is None:
        return dram, nvme
    kinds: list[str] = []
    for reader in readers:
        match reader.required_text("kind"):
            case "dram":
                kinds.append("dram")
                dram = _read_dram(reader)
            case "nvme":
                kinds.append("nvme")
                nvme = _read_nvme(reader)
            case later if later in _LATER:
                reader.report("kind", f"{later} is not available in this version (available: {', '.join(_AVAILABLE)})")
                reader.ignore_rest()
            case unknown:
                if unknown:
                    reader.report("kind", f"must be one of {', '.join(_AVAILABLE)}, not {unknown!r}")
                reader.ignore_rest()
        reader.finish()
    if len(kinds) == len(readers) and kinds != list(_AVAILABLE):
        written = ", ".join(kinds) or "none"
        problems.append(f"tiers: must be one dram tier and then one nvme tier, which is home; written: {written}")
    return dram, nvme


def _read_dram(reader: TableReader) -> DramSettings:
    default = DramSettings()
    capacity_bytes = reader.optional_size_bytes("capacity", low=4 * _MIB, high=1024 * _TIB)
    # An arena smaller than one region is one smaller region: tests and small machines need not name both.
    region_default = default.region_bytes if capacity_bytes is None else min(default.region_bytes, capacity_bytes)
    region_bytes = reader.size_bytes("region_size", region_default, low=_MIB, high=64 * 2**30)
    if capacity_bytes is not None and region_bytes > capacity_bytes:
        reader.report("region_size", f"is larger than the tier's capacity of {capacity_bytes} B")
    return DramSettings(
        capacity_bytes=capacity_bytes,
        path=_path(reader),
        high_watermark=_high_watermark(reader, default.high_watermark),
        region_bytes=region_bytes,
        huge_pages=reader.flag("huge_pages", default=default.huge_pages),
    )


def _read_nvme(reader: TableReader) -> NvmeSettings:
    default = NvmeSettings()
    capacity_bytes = reader.optional_size_bytes("capacity", low=4 * _MIB, high=1024 * _TIB)
    segment_default = default.segment_bytes if capacity_bytes is None else min(default.segment_bytes, capacity_bytes)
    segment_bytes = reader.size_bytes("segment_size", segment_default, low=_MIB, high=_TIB)
    if capacity_bytes is not None and segment_bytes > capacity_bytes:
        reader.report("segment_size", f"is larger than the tier's capacity of {capacity_bytes} B")
    return NvmeSettings(
        capacity_bytes=capacity_bytes,
        path=_path(reader),
        high_watermark=_high_watermark(reader, default.high_watermark),
        segment_bytes=segment_bytes,
    )


def _path(reader: TableReader) -> Path | None:
    path = reader.optional_text("path")
    return None if path is None else Path(path)


def _high_watermark(reader: TableReader, default: float) -> float:
    return reader.fraction("high_watermark", default, low=_WATERMARK_LOW, high=_WATERMARK_HIGH)
