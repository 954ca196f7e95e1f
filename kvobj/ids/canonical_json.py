"""Canonical JSON (RFC 8785): one text for one value, so that its hash names the value on every machine and in every language.

Object members are in the order of their names' UTF-16 code units, numbers are printed as ECMAScript does, nothing is escaped that
need not be. For values as JSON and msgpack decoders make them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Final

_SAFE_INTEGER: Final = 2**53 - 1
_FIXED_DIGITS: Final = 21
"""ECMAScript prints numbers below 10^21 without an exponent …"""
_SMALL_ZEROS: Final = -6
"""… and from 10^-6 on."""


def canonical_json(value: object) -> bytes:
    """The UTF-8 bytes. ValueError for what has no canonical form: NaN, infinities, whole numbers beyond ±(2^53-1), lone surrogates,
    names that are no texts, values that JSON has not."""
    try:
        return _text(value).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text has a lone surrogate") from error


def _text(value: object) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case int():
            if abs(value) > _SAFE_INTEGER:
                raise ValueError("a whole number is beyond 2^53-1")
            return str(value)
        case float():
            return number_text(value)
        case str():
            return json.dumps(value, ensure_ascii=False)
        case Mapping():
            if not all(isinstance(name, str) for name in value):
                raise ValueError("an object's names are texts")
            names = sorted(value, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
            return "{" + ",".join(f"{_text(name)}:{_text(value[name])}" for name in names) + "}"
        case Sequence() if not isinstance(value, bytes | bytearray | memoryview):
            return "[" + ",".join(_text(element) for element in value) + "]"
        case _:
            raise ValueError(f"JSON has no {type(value).__name__}")


def number_text(value: float) -> str:
    """A number as ECMAScript's Number::toString prints it: the fewest digits that read back to the same number."""
    if not math.isfinite(value):
        raise ValueError("JSON has neither NaN nor infinities")
    if value == 0:
        return "0"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = whole + fraction
    leading = len(digits) - len(digits.lstrip("0"))
    digits, point = digits[leading:].rstrip("0"), point - leading
    if len(digits) <= point <= _FIXED_DIGITS:
        return sign + digits + "0" * (point - len(digits))
    if 0 < point <= _FIXED_DIGITS:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if _SMALL_ZEROS < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    mantissa = digits if len(digits) == 1 else f"{digits[0]}.{digits[1:]}"
    return f"{sign}{mantissa}e{point - 1:+d}"
