"""Canonical CBOR (RFC 8949 §4.2.1) of the few shapes that engines hash: None, whole numbers, bytes, texts, lists of these.

What `cbor2.dumps(value, canonical=True)` and fxamacker/cbor's canonical mode give for them. Anything else is a TypeError.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

CborValue = None | int | bytes | str | Sequence["CborValue"]

_UNSIGNED: Final = 0
_NEGATIVE: Final = 1
_BYTES: Final = 2
_TEXT: Final = 3
_LIST: Final = 4
_U16: Final = struct.Struct(">BH")
_U32: Final = struct.Struct(">BI")
_HEAD_U16: Final = 25
_HEAD_U32: Final = 26
_U16_MAX: Final = 2**16 - 1
_U32_MAX: Final = 2**32 - 1
_NULL: Final = b"\xf6"
_IN_HEAD: Final = 24
"""A number below this stands in the head byte itself; above, the head says in how many bytes it follows."""


def canonical_cbor(value: CborValue) -> bytes:
    """See the module's text. Whole numbers from -2^64 to 2^64-1."""
    parts: list[bytes] = []
    _append(parts, value)
    return b"".join(parts)


def _append(parts: list[bytes], value: CborValue) -> None:
    match value:
        case bool():
            raise TypeError("no engine hashes truth values")
        case None:
            parts.append(_NULL)
        case int():
            parts.append(_head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value))
        case bytes():
            parts += (_head(_BYTES, len(value)), value)
        case str():
            encoded = value.encode()
            parts += (_head(_TEXT, len(encoded)), encoded)
        case list() | tuple():
            parts.append(_head(_LIST, len(value)))
            for element in value:
                # Token ids are nearly all there is: no call for one.
                if type(element) is int and 0 <= element <= _U32_MAX:
                    parts.append(
                        _SMALL[element]
                        if element < len(_SMALL)
                        else _U16.pack(_HEAD_U16, element)
                        if element <= _U16_MAX
                        else _U32.pack(_HEAD_U32, element)
                    )
                else:
                    _append(parts, element)
        case _:
            raise TypeError(f"no engine hashes a {type(value).__name__}")


def _head(kind: int, number: int) -> bytes:
    if number < _IN_HEAD:
        return bytes([kind << 5 | number])
    for step, width in enumerate((1, 2, 4, 8)):
        if number < 1 << (8 * width):
            return bytes([kind << 5 | (_IN_HEAD + step)]) + number.to_bytes(width, "big")
    raise OverflowError("a number of more than 64 bits")


_SMALL: Final = [_head(_UNSIGNED, number) for number in range(256)]
