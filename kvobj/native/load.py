"""Finds and loads the native library, once a process.

A library made from other sources than those beside it is not used: after a change in a checkout, `make native` builds it anew.
`KVOBJ_NATIVE=off` in the environment chooses the pure twins.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from typing import Final

from kvobj.native.build import LIBRARY, fingerprint, sources

SWITCH: Final = "KVOBJ_NATIVE"


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """Whether the native library is in use; `detail` says why not, or which it is."""

    is_loaded: bool
    detail: str


def library() -> ctypes.CDLL | None:
    """The library, or None where the pure twins must do. Its functions keep no global state."""
    return _load()[0]


def status() -> NativeStatus:
    """For people: what `kvobj-admin status` shows."""
    loaded, detail = _load()
    return NativeStatus(loaded is not None, detail)


@cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get(SWITCH, "").lower() in {"off", "0", "no"}:
        return None, f"switched off by {SWITCH}"
    if not LIBRARY.exists():
        return None, "not built: there was no C compiler when kvobj was installed, it failed, or was not to be used"
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        ask = loaded.kvobj_native_fingerprint
    except (OSError, AttributeError) as error:
        return None, f"does not load: {error}"
    ask.restype = ctypes.c_char_p
    made_from = (ask() or b"").decode()
    if sources() and made_from != fingerprint():
        return None, "stale: its sources have changed since it was built (make native)"
    return loaded, f"native library {made_from}"
