"""The targets of codecs that do not depend on a machine's speed: docs/codecs.md, Figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from codec_bench.rows import Row, find

Field = Literal["bits", "ratio", "relative_k", "relative_v", "attention"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a field of one codec's row is to be on the sets whose name begins so, whole windows as one chunk."""

    data: str
    codec: str
    field: Field
    bound: float
    is_least: bool = False

    @property
    def says(self) -> str:
        """For people."""
        return f"{self.codec} {self.field} {'>=' if self.is_least else '<='} {self.bound:g}"

    def is_met(self, row: Row) -> bool:
        """Whether a row keeps it."""
        value = float(getattr(row, self.field))
        return value >= self.bound if self.is_least else value <= self.bound


OVERHEAD_BITS: Final = 0.12
"""Everything in a frame of eq4 but symbols and guarded rows, at 256 tokens of 128 dimensions."""

_EQ55: Final[tuple[tuple[Field, float], ...]] = (
    ("bits", 5.65),
    ("relative_k", 0.0265),  # fp8's error, at 8 bits
    ("relative_v", 0.0265),
    ("attention", 0.025),
)
TARGETS: Final = (
    *(Target(data, "x3", "ratio", 1.40, is_least=True) for data in ("minilm", "synth")),
    *(Target(data, "xa", "ratio", 1.48, is_least=True) for data in ("minilm", "synth")),
    *(Target(data, "eq55", field, bound) for data in ("minilm", "synth") for field, bound in _EQ55),
    Target("minilm", "eq4", "bits", 4.15),
    Target("minilm", "eq4", "attention", 0.058),
    Target("synth", "eq4", "bits", 4.15),
    Target("synth", "eq4", "attention", 0.068),
    Target("minilm", "eq3", "bits", 3.15),
    Target("minilm", "eq3", "attention", 0.117),
    Target("synth", "eq3", "bits", 3.15),
    Target("synth", "eq3", "attention", 0.135),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target on one set: what was measured, None where nothing was."""

    data: str
    says: str
    value: float | None
    is_met: bool


def judge(rows: Sequence[Row], windows: dict[str, int], overhead: float | None) -> list[Verdict]:
    """Every target on every set that was measured (`windows`: name to tokens of a window), certificates and overhead.

    A target whose codec has no row is missed.
    """
    verdicts = []
    for data, tokens in windows.items():
        for target in TARGETS:
            if data != target.data and not data.startswith(f"{target.data}-"):
                continue
            row = find(rows, data, target.codec, tokens)
            value = None if row is None else float(getattr(row, target.field))
            verdicts.append(Verdict(data, target.says, value, row is not None and target.is_met(row)))
    for row in rows:
        if row.holds is not None:
            says = f"{row.codec} certificates hold, {row.tokens} tokens"
            verdicts.append(Verdict(row.data, says, row.tightness, row.holds))
    is_met = overhead is not None and overhead <= OVERHEAD_BITS
    verdicts.append(Verdict("synth 32 x 8 x 256 x 128", f"eq4 overhead <= {OVERHEAD_BITS:g}", overhead, is_met))
    return verdicts
