"""Blocks for tests of codecs: words of numpy arrays in and out of a codec, on each variant of the CPU library that runs here."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from kvobj.tensors.codec_protocol import BlockToDecode, BlockToEncode, Coding, EncodedLength, TensorCodec
from kvobj.tensors.form import TensorForm
from kvobj.tensors.kernels import build, load
from kvobj.tensors.kernels.host_launcher import HostLauncher
from kvobj.tensors.kernels.host_memory import address_of
from kvobj.tensors.kernels.launcher import Address, Launcher

Words = npt.NDArray[np.uint16]
_FENCE = 64
_FENCED = 0xA5


@cache
def launchers() -> dict[str, HostLauncher]:
    """Variant → its launcher, best first; empty where no library was built."""
    flags = load._cpu_flags()
    found = {}
    for variant in build.variants():
        if build.library(variant).exists() and load._NEEDS.get(variant, set()) <= flags:
            found[variant] = HostLauncher(ctypes.CDLL(str(build.library(variant))))
    return found


class Fenced:
    """Memory aligned to 256 bytes with a fence on both sides; `intact` says whether something was written beyond it."""

    def __init__(self, size: int, fill: int = 0xEE) -> None:
        self._memory = bytearray([_FENCED]) * (size + 256 + 2 * _FENCE)
        start = -address_of(memoryview(self._memory)) % 256
        self._from = start + (_FENCE if start < _FENCE else 0)
        self._from += -(address_of(memoryview(self._memory)) + self._from) % 16
        self.view = memoryview(self._memory)[self._from : self._from + size]
        self.view[:] = bytes([fill]) * size

    @property
    def address(self) -> Address:
        """Where it is."""
        return address_of(self.view) if len(self.view) else Address(address_of(memoryview(self._memory)) + self._from)

    @property
    def intact(self) -> bool:
        """Whether both fences stand."""
        end = self._from + len(self.view)
        fences = self._memory[: self._from] + self._memory[end:]
        return not fences.strip(bytes([_FENCED]))


def form_of(words: Words, dtype: str = "bf16") -> TensorForm:
    """The form of one block, words [head][token][dim]."""
    heads, tokens, dim = words.shape
    return TensorForm("k", dtype, 1, heads, dim, tokens)  # type: ignore[arg-type]


def encoded(
    codec: TensorCodec, launcher: Launcher, words: Words, coding: Coding, *, number: int = 0, fill: int = 0xEE
) -> tuple[EncodedLength, bytes, Words]:
    """One block: what became of it, its bytes, and the words that the encoder says they decode to."""
    plain = Fenced(words.nbytes)
    plain.view[:] = words.tobytes()
    slot, decoded = Fenced(codec.slot_bytes(coding.form), fill), Fenced(words.nbytes, fill)
    [done] = codec.encode(launcher, coding, [BlockToEncode(number, plain.address, slot.address, decoded.address)])
    assert plain.intact
    assert slot.intact
    assert decoded.intact
    assert bytes(plain.view) == words.tobytes()
    after = np.frombuffer(bytes(decoded.view), np.uint16).reshape(words.shape)
    return done, bytes(slot.view[: done.length]), after


def decoded(
    codec: TensorCodec,
    launcher: Launcher,
    data: bytes,
    coding: Coding,
    *,
    number: int = 0,
    length: int | None = None,
) -> tuple[int, Words]:
    """One block: the status, and the words. The bytes are exactly as long as they say, so that a read beyond them meets a fence."""
    form = coding.form
    source, plain = Fenced(len(data)), Fenced(form.block_bytes)
    source.view[:] = data
    block = BlockToDecode(number, source.address, len(data) if length is None else length, plain.address)
    [status] = codec.decode(launcher, coding, [block])
    assert plain.intact
    assert source.intact
    assert bytes(source.view) == data
    shape = (form.kv_heads, form.tokens, form.head_dim)
    return status, np.frombuffer(bytes(plain.view), np.uint16).reshape(shape)


def values_of(words: Words, dtype: str = "bf16") -> npt.NDArray[np.float32]:
    """The floats of words, exactly."""
    if dtype == "fp16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << 16).view(np.float32)


def words_of(values: npt.NDArray[np.floating], dtype: str = "bf16") -> Words:
    """Words nearest to finite values, ties to even."""
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def gaussian(heads: int, tokens: int, dim: int, *, seed: int = 0, dtype: str = "bf16") -> Words:
    """Words like those of a model: gains of channels, an offset of some, noise."""
    random = np.random.default_rng(seed)
    gains = np.exp(0.4 * random.standard_normal((heads, 1, dim)))
    offsets = random.standard_normal((heads, 1, dim)) * (random.random((heads, 1, dim)) < 0.1) * 8
    return words_of((random.standard_normal((heads, tokens, dim)) * gains + offsets).astype(np.float32), dtype)
