"""Tensors for golden vectors, made of integers alone, so that every machine and every later version makes the same bytes.

A case is a form and its plain bytes. Cases are added, never changed: their digests stand in `golden/tensor_frames`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from kvobj.tensors.form import AXES, TensorForm
from kvobj.tensors.profiles import BlockBasis, Profile, Rope

PAGED: Final = ("layer", "kv", "token", "head", "dim")
SPLIT: Final = ("kv", "layer", "token", "head", "dim")
TRANSPOSED: Final = ("layer", "kv", "head", "dim", "token")


def noise(seed: int) -> Iterator[int]:
    """32-bit integers of a linear congruential generator (Knuth's MMIX constants), its upper half."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
        yield state >> 32


def element(value: float, dtype: str) -> bytes:
    """A number of a few bits, so without rounding in a double, as an element: to nearest, ties to even."""
    match dtype:
        case "fp32":
            return struct.pack("<f", value)
        case "fp16":
            return struct.pack("<e", value)
        case "bf16":
            (bits,) = struct.unpack("<I", struct.pack("<f", value))
            return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
        case _:
            return bytes([int(value * 16) & 0xFF])


def model_like(form: TensorForm) -> bytes:
    """Values as of a model, in the form's declared order: bell-shaped, channels of unequal size, some off centre."""
    stream, sizes, strides, width = noise(7), form.sizes, form.strides, form.element_bytes
    plain = bytearray(form.plain_bytes)
    for block in range(form.blocks):
        layer, kind = divmod(block, form.kinds)
        for head in range(sizes["head"]):
            for token in range(sizes["token"]):
                base = (
                    layer * strides["layer"] + kind * strides["kv"] + head * strides["head"] + token * strides["token"]
                )
                for dim in range(sizes["dim"]):
                    bell = sum(next(stream) >> 20 for _ in range(4)) - 8190
                    value = bell * 2.0 ** ((dim * 7 + head + block) % 5 - 12) + (4.0 if dim % 16 == block % 16 else 0.0)
                    at = (base + dim * strides["dim"]) * width
                    plain[at : at + width] = element(value, form.dtype)
    return bytes(plain)


def of_pattern(word: int) -> Callable[[TensorForm], bytes]:
    """One two-byte pattern everywhere."""
    return lambda form: struct.pack("<H", word) * (form.plain_bytes // 2)


def all_patterns(form: TensorForm) -> bytes:
    """Every two-byte pattern, in an order that mixes them."""
    return b"".join(struct.pack("<H", at * 40503 + 12345 & 0xFFFF) for at in range(form.plain_bytes // 2))


def with_pattern(word: int) -> Callable[[TensorForm], bytes]:
    """Values as of a model, but for one pattern in the middle."""

    def made(form: TensorForm) -> bytes:
        plain = bytearray(model_like(form))
        struct.pack_into("<H", plain, len(plain) // 2, word)
        return bytes(plain)

    return made


def sparse_bits(form: TensorForm) -> bytes:
    """Noise of all bits."""
    stream = noise(11)
    return b"".join(struct.pack("<I", next(stream)) for _ in range(-(-form.plain_bytes // 4)))[: form.plain_bytes]


def profile_of(form: TensorForm) -> Profile:
    """A profile for a form: columns turned in pairs by the angle of the triangle 3, 4, 5, neighbours one step further on; keys by
    position, where the form has them and the heads are even."""
    columns = form.kv_heads * form.head_dim
    basis = [0.0] * columns**2
    for at in range(0, columns, 2):
        first, second = at * columns, (at + 1) * columns
        to = (at + 2) % columns
        basis[first + to], basis[first + to + 1] = 0.6, 0.8
        basis[second + to], basis[second + to + 1] = -0.8, 0.6
    blocks = [
        BlockBasis(0.125 * (1 + number), [(column % 5) / 8 for column in range(columns)], basis)
        for number in range(form.blocks)
    ]
    turns = form.kind in {"kv", "k"} and form.head_dim % 2 == 0
    return Profile.build(form, blocks, Rope.of(1e4, form.head_dim) if turns else None)


@dataclass(frozen=True, slots=True)
class TensorCase:
    """A form, and how its bytes are made."""

    form: TensorForm
    make: Callable[[TensorForm], bytes] = model_like


_KV: Final = TensorForm("kv", "bf16", layers=2, kv_heads=2, head_dim=64, tokens=48, order=AXES)
_SMALL: Final = TensorForm("kv", "bf16", layers=2, kv_heads=1, head_dim=32, tokens=24, order=AXES)

CASES: Final[dict[str, TensorCase]] = {
    "kv": TensorCase(_KV),
    "kv-wide": TensorCase(TensorForm("kv", "bf16", 1, 1, 128, 160)),
    "kv-paged": TensorCase(TensorForm("kv", "bf16", 2, 2, 32, 40, PAGED)),
    "kv-split": TensorCase(TensorForm("kv", "bf16", 3, 2, 16, 17, SPLIT)),
    "kv-transposed": TensorCase(TensorForm("kv", "bf16", 1, 2, 64, 33, TRANSPOSED)),
    "k-odd": TensorCase(TensorForm("k", "bf16", 2, 3, 33, 37, PAGED)),
    "v-odd": TensorCase(TensorForm("v", "bf16", 1, 1, 31, 65)),
    "mla": TensorCase(TensorForm("mla", "bf16", 2, 1, 576, 20)),
    "one-token": TensorCase(TensorForm("kv", "bf16", 1, 4, 128, 1)),
    "one-value": TensorCase(TensorForm("k", "bf16", 1, 1, 1, 1)),
    "fp16": TensorCase(TensorForm("kv", "fp16", 2, 2, 64, 30)),
    "fp32": TensorCase(TensorForm("kv", "fp32", 1, 2, 32, 20)),
    "fp8": TensorCase(TensorForm("kv", "fp8_e4m3", 1, 2, 64, 30, PAGED)),
    "int8": TensorCase(TensorForm("kv", "int8", 1, 1, 64, 30)),
    "all-patterns": TensorCase(TensorForm("k", "bf16", 1, 2, 128, 256), all_patterns),
    "all-patterns-fp16": TensorCase(TensorForm("v", "fp16", 1, 2, 128, 256), all_patterns),
    "bits": TensorCase(_SMALL, sparse_bits),
    "zeros": TensorCase(_SMALL, of_pattern(0)),
    "negative-zeros": TensorCase(_SMALL, of_pattern(0x8000)),
    "constant": TensorCase(_SMALL, of_pattern(0x3F80)),
    "smallest": TensorCase(_SMALL, of_pattern(0x0001)),
    "largest": TensorCase(_SMALL, of_pattern(0x7F7F)),
    "one-largest": TensorCase(_SMALL, with_pattern(0xFF7F)),
    "one-infinite": TensorCase(_SMALL, with_pattern(0x7F80)),
    "one-nan": TensorCase(_SMALL, with_pattern(0xFFC1)),
    "one-denormal": TensorCase(_SMALL, with_pattern(0x0003)),
}
"""Name → case."""
