"""The codecs that frames name: number, revision, and what their headers may say. Append only: a number is never used again. Pure.

Two spellings: a *preset* (`eq4`), which people and namespaces say, and the codec's own name (`eq:83/1`: base step .083, demoted
once), which frames and rows say. For codecs without a step both are the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

FLAG_POST_ROPE: Final = 1 << 0
"""Header flag: keys are held after rotary position embedding."""
FLAG_GUARD: Final = 1 << 1
"""Header flag: the codec sends guard tokens as they are."""
FLAG_PROFILE_MEAN: Final = 1 << 2
"""Header flag: means are the profile's."""

STEP_MAX: Final = (1 << 12) - 1
"""Base step, in thousandths of a channel's root mean square."""
RUNG_MAX: Final = 15
"""How often a base step may be demoted."""


@dataclass(frozen=True, slots=True)
class CodecKind:
    """A codec as headers know it. `flags` are in each of its headers; FLAG_POST_ROPE may be besides."""

    name: str
    number: int
    revision: int = 1
    is_lossy: bool = True
    has_step: bool = False
    has_ladder: bool = False
    flags: int = 0
    needs_profile: bool = False


_ALL: Final = (
    CodecKind("x3", 0x10, is_lossy=False),
    CodecKind("xa", 0x11, is_lossy=False),
    CodecKind("f8", 0x20),
    CodecKind("eq", 0x30, has_step=True, has_ladder=True, flags=FLAG_GUARD),
    CodecKind("ek", 0x40, has_step=True, flags=FLAG_GUARD | FLAG_PROFILE_MEAN, needs_profile=True),
    CodecKind("h4", 0x50),
)
BY_NUMBER: Final = {kind.number: kind for kind in _ALL}
BY_NAME: Final = {kind.name: kind for kind in _ALL}

PRESETS: Final = {"eq57": "eq:83/0", "eq55": "eq:90/0", "eq4": "eq:83/1", "eq3": "eq:500/0", "ek": "ek:300/0"}
"""Preset → codec."""
_STEPPED: Final = re.compile(r"(eq|ek):([1-9][0-9]{0,3})/([0-9]{1,2})")


@dataclass(frozen=True, slots=True)
class CodecName:
    """A codec at one step. `base_step` is in thousandths, `rung` counts how often it is demoted; both 0 without a step."""

    kind: CodecKind
    base_step: int = 0
    rung: int = 0

    @classmethod
    def parse(cls, name: str) -> CodecName:
        """The codec of a name or preset. ValueError for one that does not exist."""
        spelled = PRESETS.get(name, name)
        kind = BY_NAME.get(spelled)
        if kind is not None and not kind.has_step:
            return cls(kind)
        stepped = _STEPPED.fullmatch(spelled)
        if stepped is not None:
            base_step, rung = int(stepped[2]), int(stepped[3])
            if base_step <= STEP_MAX and rung <= RUNG_MAX and stepped[3] == str(rung):
                return cls(BY_NAME[stepped[1]], base_step, rung)
        raise ValueError(
            f"unknown tensor codec: {name[:40]!r} (known: {', '.join(sorted({*BY_NAME, *PRESETS} - {'eq'}))})"
        )

    @classmethod
    def from_header(cls, number: int, step_index: int) -> CodecName | None:
        """The codec that a header names; None if there is none."""
        kind = BY_NUMBER.get(number)
        base_step, rung = step_index & STEP_MAX, step_index >> 12
        if kind is None or kind.has_step != bool(base_step) or (rung and not kind.has_ladder):
            return None
        return cls(kind, base_step, rung)

    @property
    def step_index(self) -> int:
        """As headers have it: base step in the low 12 bits, rung in the high 4."""
        return self.base_step | self.rung << 12

    def __str__(self) -> str:
        """The codec's own name."""
        return f"{self.kind.name}:{self.base_step}/{self.rung}" if self.kind.has_step else self.kind.name
