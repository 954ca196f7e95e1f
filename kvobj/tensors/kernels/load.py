"""Finds and loads the best kernel library that this CPU runs, once a process.

A library made from other sources than those beside it is not used: after a change in a checkout, `make native` builds it anew.
`KVOBJ_KERNELS` in the environment names a variant (`v3`) or a library's path, or says `off`.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from kvobj.tensors.kernels.build import fingerprint, library, sources, variants

SWITCH: Final = "KVOBJ_KERNELS"
_NEEDS: Final = {
    "v4": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vbmi2"},
    "v3": {"avx2", "bmi1", "bmi2", "fma", "movbe"},
}
"""Flags of /proc/cpuinfo that a variant stands on; others run on every CPU of their machine."""


@dataclass(frozen=True, slots=True)
class KernelsStatus:
    """Whether the CPU library is in use; `detail` says why not, or which it is."""

    is_loaded: bool
    detail: str


def cpu_library() -> ctypes.CDLL | None:
    """The library, or None where there is none. Its functions keep no state and release the GIL."""
    return _load()[0]


def status() -> KernelsStatus:
    """For people: what `kvobj-admin status` shows."""
    loaded, detail = _load()
    return KernelsStatus(loaded is not None, detail)


def runs_here(variant: str) -> bool:
    """Whether this CPU has what a variant stands on."""
    return _NEEDS.get(variant, set()) <= _cpu_flags()


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    wanted = os.environ.get(SWITCH, "")
    if "/" in wanted:
        return _load_path(Path(wanted), "given")
    if wanted in {"off", "0", "no"}:
        return None, f"switched off by {SWITCH}"
    problems: dict[str, str] = {}
    for variant in variants():
        if wanted and variant != wanted:
            continue
        if not runs_here(variant):
            continue
        loaded, detail = _load_path(library(variant), variant)
        if loaded is not None:
            return loaded, detail
        problems[variant] = detail
    if len(set(problems.values())) == 1:  # of none that this CPU runs: said once
        return None, next(iter(problems.values()))
    told = "; ".join(f"{variant}: {detail}" for variant, detail in problems.items())
    return None, told or f"no variant for this CPU ({wanted or 'any'})"


def _load_path(path: Path, variant: str) -> tuple[ctypes.CDLL | None, str]:
    if not path.exists():
        return None, "not built: there was no C++ compiler when kvobj was installed, it failed, or was not to be used"
    try:
        loaded = ctypes.CDLL(str(path))
        ask = loaded.kvobj_kernels_fingerprint
    except (OSError, AttributeError) as error:
        return None, f"does not load: {error}"
    ask.restype = ctypes.c_char_p
    made_from = (ask() or b"").decode()
    if sources() and made_from != fingerprint():
        return None, "stale: its sources have changed since it was built (make native)"
    return loaded, f"{variant} {made_from}"


@cache
def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()
