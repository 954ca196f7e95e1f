"""Defects of the kind that the fuzz is there to find: checks of the kernels left out, one at a time, in a copy of their sources.

All are planted into one library, since a build takes minutes; which of them is there is said when it is loaded (`arm`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_UNIT: Final = "kernels.cc"
_SWITCH: Final = "kvobj_planted"
_DECLARED: Final = f"""extern "C" __attribute__((visibility("default"))) int {_SWITCH};
int {_SWITCH} = 0;
"""


@dataclass(frozen=True, slots=True)
class Defect:
    """A condition in a kernel source, under which encoded bytes are refused; `codec` is one whose cases must notice that it is not
    asked."""

    codec: str
    source: str
    check: str


DEFECTS: Final = {
    "x3-escapes": Defect("x3", "x3.cuh", "to > end - start"),
    "xa-streams": Defect("xa", "xa.cuh", "to > all"),
    "rans-words": Defect("xa", "rans.cuh", "count > left"),
    "eq-streams": Defect("eq57", "eq.cuh", "end > length - first"),
    "eq-guards": Defect("eq4", "eq.cuh", "token < next || token >= p.tokens"),
    "ek-streams": Defect("ek", "ek.cuh", "end > room"),
}
"""Name → defect: lengths believed, a count of words, a place to write to."""


def plant(kernels: Path) -> None:
    """Put all of them into the sources in this folder. ValueError where a check is not there, or more than once."""
    for number, defect in enumerate(DEFECTS.values(), 1):
        path = kernels / defect.source
        text = path.read_text()
        if text.count(defect.check) != 1:
            raise ValueError(f"{defect.source} has {text.count(defect.check)} times: {defect.check}")
        path.write_text(text.replace(defect.check, f"({_SWITCH} != {number} && ({defect.check}))"))
    unit = kernels / _UNIT
    unit.write_text(_DECLARED + unit.read_text())


def arm(library: ctypes.CDLL, name: str) -> None:
    """Let the defect be there, in a library that was made of planted sources."""
    ctypes.c_int.in_dll(library, _SWITCH).value = 1 + list(DEFECTS).index(name)
