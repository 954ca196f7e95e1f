"""Speeds on one pinned core: plain bytes a second of our codecs beside zstd level 1 on the same bytes, rounds interleaved, medians.

Seconds are those of the thread on the core, so that what else the machine does takes none of them, only cache and memory.
Ours go through `encode_frame` and `decode_frame`, checksums, digest and certificate included. zstd takes each (layer, kind)
by itself; with byte planes the splitting and joining, by numpy, is counted.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import numpy as np
import zstandard

from codec_bench.rows import ZSTD_PLANES, ZSTD_RAW, Speed
from kvobj.tensors import codecs
from kvobj.tensors.form import TensorForm


class Subject(Protocol):
    """Encodes the chunk and decodes what it encoded, into memory that it holds."""

    name: str

    def encode(self) -> None:
        """Once over all plain bytes."""
        ...

    def decode(self) -> None:
        """Once over what `encode` left."""
        ...


class OwnCodec:
    """One of ours."""

    def __init__(self, name: str, form: TensorForm, plain: bytes) -> None:
        self.name = name
        self._form = form
        self._plain = memoryview(plain)
        self._room = memoryview(bytearray(codecs.encode_bound(name, form)))
        self._frame = self._room[:0]
        self._back = memoryview(bytearray(form.plain_bytes))

    def encode(self) -> None:
        """The frame."""
        self._frame = self._room[: codecs.encode_frame(self._plain, self._room, codec=self.name, form=self._form)]

    def decode(self) -> None:
        """Its head, and all of it."""
        head = codecs.parse_tensor_frame(self._frame, len(self._frame))
        codecs.decode_frame(self._frame, head, self._back)


class Zstd:
    """zstd level 1, each block by itself, contexts kept; in planes or not."""

    def __init__(self, form: TensorForm, plain: bytes, *, in_planes: bool) -> None:
        self.name = ZSTD_PLANES if in_planes else ZSTD_RAW
        self._blocks = [
            plain[start : start + form.block_bytes] for start in range(0, form.plain_bytes, form.block_bytes)
        ]
        self._in_planes = in_planes
        self._encoded: list[bytes] = []
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()
        self._back = np.empty((form.block_bytes // 2, 2), np.uint8)

    def encode(self) -> None:
        """All blocks."""
        self._encoded = [self._compressor.compress(part) for block in self._blocks for part in self._parts(block)]

    def decode(self) -> None:
        """All blocks, each into the same memory."""
        for at, encoded in enumerate(self._encoded):
            plain = self._decompressor.decompress(encoded)
            if self._in_planes:
                self._back[:, at % 2] = np.frombuffer(plain, np.uint8)

    def _parts(self, block: bytes) -> list[bytes]:
        if not self._in_planes:
            return [block]
        planes = np.frombuffer(block, np.uint8).reshape(-1, 2)
        return [planes[:, 0].tobytes(), planes[:, 1].tobytes()]


@dataclass(frozen=True, slots=True)
class _Timed:
    encode: list[float]
    decode: list[float]


def measure(
    form: TensorForm, plain: bytes, names: Sequence[str], *, rounds: int, core: int | None = None
) -> list[Speed]:
    """The speeds of our codecs of these names and of zstd, over the form's plain bytes, in plain bytes a second."""
    with pinned(core):
        subjects: list[Subject] = [
            *(OwnCodec(name, form, plain) for name in names),
            Zstd(form, plain, in_planes=False),
            Zstd(form, plain, in_planes=True),
        ]
        timed: dict[str, _Timed] = defaultdict(lambda: _Timed([], []))
        for _ in range(rounds + 1):
            for subject in subjects:
                timed[subject.name].encode.append(_seconds(subject.encode))
                timed[subject.name].decode.append(_seconds(subject.decode))
    # The first round touches memory and fills caches.
    return [
        Speed(name, form.plain_bytes / median(found.encode[1:]), form.plain_bytes / median(found.decode[1:]))
        for name, found in timed.items()
    ]


@contextmanager
def pinned(core: int | None = None) -> Iterator[None]:
    """The calling thread on one core, the last of those that it may use unless another is named."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before) if core is None else core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _seconds(work: Callable[[], None]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started
