"""What kernels that code with rANS (`rans.cuh`) make of the committed tables (`tables_*.cuh`): once for each launcher, before the
first of them runs."""

from __future__ import annotations

import os
import threading
from typing import Final

from kvobj.tensors.kernels.launcher import Launcher

_WARPS: Final = 128
"""One for each table of the two alphabets."""
_EQ_COST_ROWS: Final = 65
"""One for each two |q| to 127, and one for the escape."""
_prepared: set[Launcher] = set()


class _Preparing:
    """The lock is held while a launcher's tables are made."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """In a forked child: the thread that had the lock is the parent's. Tables that it had only begun are made anew."""
        self.lock = threading.Lock()


_preparing: Final = _Preparing()
os.register_at_fork(after_in_child=_preparing.forget)


def prepare(launcher: Launcher) -> None:
    """Have the tables in the launcher's memory. Any thread may call it; the first call takes a millisecond, and waits for a device,
    others cost nothing."""
    if launcher in _prepared:
        return
    with _preparing.lock:
        if launcher in _prepared:
            return
        launcher.launch("rans_prepare", _WARPS, 0)
        launcher.launch("eq_prepare", _EQ_COST_ROWS, _EQ_COST_ROWS)
        launcher.download(
            launcher.scratch("rans_prepare", 1), memoryview(bytearray(1))
        )  # other streams see the tables from here on
        _prepared.add(launcher)
