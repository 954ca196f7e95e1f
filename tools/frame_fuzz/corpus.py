"""Sound frames of every codec, small and of many forms, from a seed: what the fuzz damages."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from typing import Final

from kvobj.tensors.codec_names import CodecName
from kvobj.tensors.codecs import encode_bound, encode_frame, parse_tensor_frame, refusal
from kvobj.tensors.form import ELEMENT_BYTES, ORDERS, Dtype, Kind, TensorForm
from kvobj.tensors.frame import TensorFrame
from kvobj.tensors.profiles import BlockBasis, Profile, Rope

CODECS: Final = ("x3", "xa", "f8", "eq57", "eq4", "eq:83/2", "eq55", "eq3", "eq:7/0", "h4", "ek")
_BF16_SPECIAL: Final = (0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 0x3F80)
"""Zeros, a denormal, infinities, a NaN, the largest finite value, one."""
_PLAIN_MAX: Final = 32 * 1024
_PROFILE_COLUMNS_MAX: Final = 256
"""Above 128 a block of `ek` has more streams than one."""
_TILE: Final = 32


@dataclass(frozen=True, slots=True)
class Sample:
    """A sound frame with its head, and the profile that it names."""

    codec: str
    frame: bytes
    head: TensorFrame
    profile: Profile | None

    @property
    def has_coded_blocks(self) -> bool:
        """Whether there is anything for a codec to read."""
        return any(not block.is_raw for block in self.head.blocks)


def samples(codec: str, *, seed: int, count: int) -> list[Sample]:
    """So many frames of a codec, of forms that it takes; a few of them of RAW blocks alone."""
    made: list[Sample] = []
    raw, generator = 0, random.Random(f"{codec}/{seed}")
    while len(made) < count:
        form = _form(codec, generator)
        profile = _profile(form, generator) if CodecName.parse(codec).kind.needs_profile else None
        first_position = generator.choice((0, 0, 1023, 4096, 2**20 - form.tokens))
        plain, room = plain_of(form, generator), memoryview(bytearray(encode_bound(codec, form)))
        length = encode_frame(
            memoryview(plain), room, codec=codec, form=form, profile=profile, first_position=first_position
        )
        frame = bytes(room[:length])
        sample = Sample(codec, frame, parse_tensor_frame(memoryview(frame), length), profile)
        if not sample.has_coded_blocks:
            raw += 1
            if raw * 8 > count:
                continue
        made.append(sample)
    return made


def any_form(generator: random.Random) -> TensorForm:
    """A form that a frame can hold, not always one that a codec takes."""
    kind: Kind = generator.choice(("kv", "kv", "k", "v", "mla"))
    dtype: Dtype = generator.choice(("bf16",) * 5 + ("fp16",) * 2 + ("fp8_e4m3", "fp8_e5m2", "fp32", "uint8"))
    return TensorForm(
        kind=kind,
        dtype=dtype,
        layers=generator.randint(1, 2),
        kv_heads=1 if kind == "mla" else generator.randint(1, 4),
        head_dim=generator.choice((1, 7, 16, 32, 32, 40, 64, 64, 128, 256)),
        tokens=generator.choice((1, 2, 15, 16, 24, 33, 48, 64, 96, 128)),
        order=generator.choice((ORDERS[0], generator.choice(ORDERS))),
    )


def _form(codec: str, generator: random.Random) -> TensorForm:
    while True:
        form = any_form(generator)
        columns = form.kv_heads * form.head_dim
        if refusal(codec, form) is not None or form.plain_bytes > _PLAIN_MAX:
            continue
        if not CodecName.parse(codec).kind.needs_profile or columns <= _PROFILE_COLUMNS_MAX:
            return form


def plain_of(form: TensorForm, generator: random.Random) -> bytes:
    """Values as caches have them, mostly: Gaussian columns of unlike widths, sometimes with tokens that stand out, with special
    patterns, or no values at all."""
    pick = generator.random()
    if form.dtype not in {"bf16", "fp16"} or pick < 0.04:  # noqa: PLR2004 - one in 25
        return _exponents_alike(form, generator)
    count, strides, sizes = form.plain_bytes // ELEMENT_BYTES[form.dtype], form.strides, form.sizes
    widths = [2.0 ** generator.uniform(-5, 3) for _ in range(sizes["dim"])]
    heights = [1.0] * sizes["token"]
    if pick < 0.4:  # noqa: PLR2004
        heights[generator.randrange(len(heights))] = generator.choice((0.01, 20.0, 100.0))
    values = [
        generator.gauss(0.0, 1.0)
        * widths[at // strides["dim"] % sizes["dim"]]
        * heights[at // strides["token"] % sizes["token"]]
        for at in range(count)
    ]
    if form.dtype == "fp16":
        return struct.pack(f"<{count}e", *(min(max(value, -6e4), 6e4) for value in values))
    words = [bits >> 16 for bits in struct.unpack(f"<{count}I", struct.pack(f"<{count}f", *values))]
    if generator.random() < 0.1:  # noqa: PLR2004
        words = [generator.choice(_BF16_SPECIAL) if generator.random() < 0.02 else word for word in words]  # noqa: PLR2004
    return struct.pack(f"<{count}H", *words)


def _exponents_alike(form: TensorForm, generator: random.Random) -> bytes:
    """Random bytes, of which the last of each value, its exponent, is one of a few, or any."""
    data = bytearray(generator.randbytes(form.plain_bytes))
    if generator.random() < 0.7:  # noqa: PLR2004
        few, step = generator.randbytes(generator.randint(1, 3)), form.element_bytes
        data[step - 1 :: step] = bytes(generator.choices(few, k=form.plain_bytes // step))
    return bytes(data)


def _profile(form: TensorForm, generator: random.Random) -> Profile:
    """Bases of tiles that are Walsh-Hadamard's or nothing, means and sizes at random, RoPE where a head can be turned."""
    columns = form.kv_heads * form.head_dim
    one = 1 / math.sqrt(_TILE)
    signs = [[one * (-1) ** (row & at).bit_count() for at in range(_TILE)] for row in range(_TILE)]
    blocks = []
    for _ in range(form.blocks):
        basis = [0.0] * columns**2
        for row in range(columns):
            first = row // _TILE * _TILE
            basis[row * columns + first : row * columns + first + _TILE] = signs[row % _TILE]
        means = [generator.gauss(0.0, 0.5) for _ in range(columns)]
        blocks.append(BlockBasis(generator.choice((0.5, 1.0, 3.0)), means, basis))
    has_rope = form.head_dim % 2 == 0 and generator.random() < 0.5  # noqa: PLR2004
    return Profile.build(form, blocks, Rope.of(10_000.0, form.head_dim) if has_rope else None)
