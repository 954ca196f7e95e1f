"""The disk's own speed: plain O_DIRECT writes of one size, each made durable, by one or several threads.

The limit for PUTs acknowledged `local`: the file is preallocated, so a write changes no file system metadata but times.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from limits import prefaulted

if TYPE_CHECKING:
    from pathlib import Path


def plain_disk_bytes_per_second(path: Path, *, size_bytes: int, writers: int, count: int) -> float:
    """Write `count` times `size_bytes` in each of `writers` threads, fdatasync after each; remove the file."""
    total = size_bytes * writers * count
    direct = os.O_DIRECT
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | direct, 0o600)
    except OSError:  # a file system without O_DIRECT: compare like with like, buffered
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, total)
        memory = prefaulted(size_bytes)

        def write(first: int) -> None:
            for index in range(count):
                os.pwrite(descriptor, memory, (first + index) * size_bytes)
                os.fdatasync(descriptor)

        threads = [threading.Thread(target=write, args=(writer * count,)) for writer in range(writers)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return total / (time.monotonic() - began)
    finally:
        os.close(descriptor)
        path.unlink()
