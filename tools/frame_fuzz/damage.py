"""What is done to encoded bytes: cases of the fuzz, each from a generator of its own."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Final

from kvobj.tensors.checksums import crc32c
from kvobj.tensors.form import TensorForm
from kvobj.tensors.frame import (
    DIRECTORY_ENTRY_BYTES,
    HEADER_BYTES,
    Block,
    BlockPlaces,
    TensorFrame,
    write_tensor_head,
)

_BYTES: Final = (0x00, 0xFF, 0x7F, 0x80, 0x01, 0x1F, 0x20, 0x3F, 0x40)
_WORDS: Final = (0, 1, 31, 32, 63, 64, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_DIRECTORY_FIELDS: Final = 3


def damaged(encoded: bytes, generator: random.Random) -> bytes:
    """Encoded bytes after one to six changes: bits, bytes, words near their ends, pieces moved, cut off, or added."""
    data = bytearray(encoded)
    for _ in range(generator.choice((1, 1, 2, 2, 3, 6))):
        _change(data, generator)
    return bytes(data)


def reframed(head: TensorFrame, blocks: list[bytes]) -> bytes | None:
    """A frame of these encoded blocks with a sound head and sound checksums, so that they reach the decoder; None where the head
    cannot say it (a block as long as its values, or empty)."""
    places, entries, body = BlockPlaces(head.form), [], []
    for block, encoded in zip(head.blocks, blocks, strict=True):
        if not block.is_raw and not 0 < len(encoded) < head.form.block_bytes:
            return None
        offset = places.add(len(encoded))
        entries.append(Block(offset, len(encoded), crc32c(memoryview(encoded)), block.is_raw))
        body.append((offset, encoded))
    frame = bytearray(places.end)
    for offset, encoded in body:
        frame[offset : offset + len(encoded)] = encoded
    write_tensor_head(memoryview(frame), replace(head, blocks=tuple(entries), frame_bytes=places.end))
    return bytes(frame)


def with_damaged_head(frame: bytes, generator: random.Random) -> bytes:
    """A frame whose header or directory was changed and whose header checksum is right again."""
    data = bytearray(frame)
    for _ in range(generator.choice((1, 1, 2, 3))):
        if generator.random() < 0.7:  # noqa: PLR2004 - a share
            at = generator.randrange(4, HEADER_BYTES - 8)
            data[at] = generator.choice((*_BYTES, generator.randrange(256)))
        else:
            entries = (len(data) - HEADER_BYTES) // DIRECTORY_ENTRY_BYTES
            at = HEADER_BYTES + 4 * generator.randrange(_DIRECTORY_FIELDS * max(1, min(entries, 4)))
            if at + 4 <= len(data):
                struct.pack_into("<I", data, at, generator.choice(_WORDS))
    struct.pack_into("<I", data, HEADER_BYTES - 4, crc32c(memoryview(data)[: HEADER_BYTES - 4]))
    return bytes(data)


def damaged_profile(data: bytes, generator: random.Random) -> bytes:
    """A profile's object of the same length with a few changed bytes, some of them where its sizes stand."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 8))):
        reach = generator.choice((32, 256, len(changed)))
        changed[generator.randrange(min(reach, len(changed)))] = generator.choice((*_BYTES, generator.randrange(256)))
    return bytes(changed)


def other_form(form: TensorForm, generator: random.Random) -> TensorForm:
    """A form that is like another, but for one size: a block of the one read as a block of the other."""
    name = generator.choice(("kv_heads", "head_dim", "tokens"))
    if name == "kv_heads" and form.kind == "mla":
        name = "tokens"
    size = max(1, getattr(form, name) + generator.choice((-16, -1, 1, 2, 31, 32)))
    return replace(form, **{name: size})


def _change(data: bytearray, generator: random.Random) -> None:
    if not data:
        data += generator.randbytes(4)
        return
    # Heads of blocks, where lengths and counts stand, are short: half of the changes are made there.
    reach = len(data) if generator.random() < 0.5 else min(len(data), 64)  # noqa: PLR2004
    at = generator.randrange(reach)
    match generator.randrange(8):
        case 0:
            data[at] ^= 1 << generator.randrange(8)
        case 1:
            data[at] = generator.choice(_BYTES)
        case 2:
            size = generator.choice((2, 4))
            is_usual = generator.random() < 0.7  # noqa: PLR2004
            word = generator.choice(_WORDS) if is_usual else len(data) + generator.randint(-4, 4)
            data[at : at + size] = (word & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        case 3:
            del data[at : at + generator.choice((1, 2, 3, 4, 16, 64, len(data)))]
        case 4:
            data[at:at] = generator.randbytes(generator.choice((1, 2, 4, 32)))
        case 5:
            del data[-generator.choice((1, 2, 4, 8, 64)) :]
        case 6:
            length = generator.choice((4, 16, 64))
            source = generator.randrange(len(data))
            data[at : at + length] = data[source : source + length]
        case _:
            length = generator.choice((1, 4, 16, 64, 256, 2048))
            data[at : at + length] = generator.choice((bytes(length), b"\xff" * length, generator.randbytes(length)))
