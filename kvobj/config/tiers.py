"""Reads `[[tiers]]`: an hbm tier where there is a GPU for it, one dram tier, then one nvme tier, then a remote tier or none.

Bodies are received into the arena that the dram tier holds, and every write comes to nvme first, so neither can be left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvobj.config.remote import read_remote
from kvobj.config.settings import (
    DramSettings,
    HbmCodecName,
    HbmMemoryName,
    HbmSettings,
    NvmeSettings,
    RemoteSettings,
)
from kvobj.config.table_reader import TableReader

_MIB: Final = 2**20
_TIB: Final = 2**40
_KINDS: Final = ("hbm", "dram", "nvme", "remote")
_NEEDED: Final = ["dram", "nvme"]
_WATERMARK_LOW: Final = 0.1
_WATERMARK_HIGH: Final = 0.99


@dataclass(slots=True)
class TierTables:
    """The settings of each kind of tier."""

    hbm: HbmSettings | None = None
    dram: DramSettings = field(default_factory=DramSettings)
    nvme: NvmeSettings = field(default_factory=NvmeSettings)
    remote: RemoteSettings | None = None


def read_tiers(readers: list[TableReader] | None, problems: list[str], *, environment: Mapping[str, str]) -> TierTables:
    """Settings of the tiers. None: nothing was written down, dram and nvme are sized by the machine and there is no other."""
    tiers = TierTables()
    if readers is None:
        return tiers
    kinds: list[str] = []
    for reader in readers:
        kind = reader.required_text("kind")
        match kind:
            case "hbm":
                tiers.hbm = _read_hbm(reader)
            case "dram":
                tiers.dram = _read_dram(reader)
            case "nvme":
                tiers.nvme = _read_nvme(reader)
            case "remote":
                tiers.remote = read_remote(reader, environment)
            case unknown:
                if unknown:
                    reader.report("kind", f"must be one of {', '.join(_KINDS)}, not {unknown!r}")
                reader.ignore_rest()
        if kind in _KINDS:
            kinds.append(kind)
        reader.finish()
    before, behind = ["hbm"] * ("hbm" in kinds), ["remote"] * ("remote" in kinds)
    if len(kinds) == len(readers) and kinds != [*before, *_NEEDED, *behind]:
        written = ", ".join(kinds) or "none"
        problems.append(
            "tiers: must be one dram tier and then one nvme tier, which is home, with one hbm tier before them or none, and one "
            f"remote tier behind them or none; written: {written}"
        )
    return tiers


def _read_hbm(reader: TableReader) -> HbmSettings:
    capacity_bytes = reader.optional_size_bytes("capacity", low=_MIB, high=1024 * _TIB)
    if capacity_bytes is None and not reader.has("capacity"):
        # No default: what is free on a GPU belongs to the engine beside us.
        reader.report("capacity", "is missing: how much of the GPU's memory the tier may have")
    codec: HbmCodecName = reader.choice("codec", ("raw",), "raw")
    memory: HbmMemoryName = reader.choice("memory", ("device", "host"), "device")
    return HbmSettings(
        capacity_bytes=capacity_bytes or _MIB,
        device=reader.whole_number("device", 0, low=0, high=1023),
        codec=codec,
        max_sms=reader.whole_number("max_sms", 1, low=1, high=4096) if reader.has("max_sms") else None,
        memory=memory,
    )


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
