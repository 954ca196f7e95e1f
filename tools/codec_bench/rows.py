"""What was measured: a row for each set, codec and chunk length; how rows travel to JSON and back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final, Literal

Group = Literal["ours", "model", "other"]
"""Whose codec it is; `model` is the independent model of ours, sizes by entropy."""
PLAIN_BITS: Final = 16
ZSTD_RAW: Final = "zstd-1 raw"
ZSTD_PLANES: Final = "zstd-1 byte planes"


@dataclass(frozen=True, slots=True)
class Row:
    """One codec on one set. `bits` are those of a value, with everything counted; errors are 0 where it is lossless.

    `holds` says whether every object's certificate held; `tightness` is the largest measured error over what was certified.
    None where there is no certificate.
    """

    data: str
    codec: str
    group: Group
    tokens: int
    bits: float
    relative_k: float = 0.0
    relative_v: float = 0.0
    attention: float = 0.0
    worst_cosine: float = 0.0
    holds: bool | None = None
    tightness: float | None = None

    @property
    def ratio(self) -> float:
        """Plain bytes over stored bytes."""
        return PLAIN_BITS / self.bits

    @property
    def is_lossless(self) -> bool:
        """Whether every value came back as it was."""
        return self.relative_k == 0.0 and self.relative_v == 0.0


@dataclass(frozen=True, slots=True)
class Speed:
    """One codec on one pinned core: plain bytes a second, medians of the rounds."""

    codec: str
    encode: float
    decode: float


def find(rows: Iterable[Row], data: str, codec: str, tokens: int) -> Row | None:
    """The row of that name, None where it was not measured."""
    wanted = (data, codec, tokens)
    return next((row for row in rows if (row.data, row.codec, row.tokens) == wanted), None)


def spread(rows: Sequence[Row], field: str) -> tuple[float, float, float]:
    """Smallest, mean and largest of a field. ValueError where there are no rows."""
    values = [float(getattr(row, field)) for row in rows]
    return min(values), fmean(values), max(values)


def to_json(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """As `docs/figures` keeps them, rounded to what is meaningful."""
    return [
        {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(row).items()}
        for row in rows
    ]


def from_json(entries: Iterable[dict[str, Any]]) -> list[Row]:
    """Rows that `to_json` wrote."""
    return [Row(**entry) for entry in entries]
