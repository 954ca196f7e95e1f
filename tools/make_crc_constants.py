"""The constants of the native CRCs from their polynomials: what `kvobj/native/crc_constants.h` holds.

Polynomials over the field of two elements are integers here, bit i the coefficient of x^i. The constants are as the registers of
a reflected CRC hold them: their 64 bits reversed.

A CRC of 32 bits with the polynomial P is one of 64 bits with P·x^32, so that all are made in one way: M·x^64 modulo P·x^32 is
(M·x^32 modulo P)·x^32, which reversed is the CRC's own 32 bits and zeros above.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from command_line import Parser, run_tool

FILE: Final = Path(__file__).parent.parent / "kvobj" / "native" / "crc_constants.h"
POLYNOMIALS: Final = {"CRC32": 0x104C11DB7, "CRC32C": 0x11EDC6F41, "CRC64NVME": 0x1AD93D23594C93659}
"""As RFC 1952 §8, RFC 3720 §12.1 and the NVM Express NVM Command Set specification have them."""
DISTANCES: Final = (16, 32, 64, 128, 256)
"""Bytes over which sums are moved: one vector of each width, and four."""

STREAM_BYTES: Final = (9 * 4096, 4096)
"""Of each of the three streams of CRC-32C that an instruction goes through beside the vectors. With vectors of 32 bytes that makes
252 KiB or 28 in all, so that of a block of 256 KiB 4 are left; with those of 16 bytes 144 or 16, which leaves nothing."""

_BITS: Final = 64
_HEAD: Final = """\
/* The constants of the CRCs that crcs.c makes, by tools/make_crc_constants.py, which says how: not changed by hand. */

static const struct crc crcs[] = {
"""


def main() -> int:
    """Write the file, or with `--check` compare."""
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the file differs")
    check: bool = parser.parse_args().check
    differs = check and FILE.read_text() != text()
    if not check:
        FILE.write_text(text())
    sys.stdout.write(f"{FILE.name}: {'DIFFERS' if differs else 'ok'}\n")
    return 1 if differs else 0


def text() -> str:
    """What the file holds."""
    crcs = "".join(_crc(name, polynomial) for name, polynomial in POLYNOMIALS.items())
    streams = "".join(_streams(POLYNOMIALS["CRC32C"], size_bytes) for size_bytes in STREAM_BYTES)
    return f"{_HEAD}{crcs}}};\n\nstatic const struct streams streams[] = {{\n{streams}}};\n"


def _crc(name: str, polynomial: int) -> str:
    bits, wide = polynomial.bit_length() - 1, _widened(polynomial)
    fields = {
        "ones": f"{(1 << bits) - 1:#x}",
        "polynomial": _word(wide ^ 1 << _BITS),
        "inverse": _word(_quotient(1 << 2 * _BITS - 1, wide)),
        **{f"over_{distance}": _pair_over(distance, wide) for distance in DISTANCES},
    }
    nibbles = [f"{_reversed(_remainder(_reversed(nibble) << 4, wide)):#x}" for nibble in range(16)]
    rows = [f"            {', '.join(nibbles[at : at + 4])},\n" for at in range(0, 16, 4)]
    return f"    [{name}] = {{\n{_lines(fields)}        .nibbles = {{\n{''.join(rows)}        }},\n    }},\n"


def _streams(polynomial: int, size_bytes: int) -> str:
    """The sum of a stream becomes two words of which it would be the sum: those are 64 places lower."""
    wide = _widened(polynomial)
    fields = {
        "bytes": f"{size_bytes}",
        "over_three": _pair_over(3 * size_bytes, wide),
        "over_two": _word(_power(16 * size_bytes - _BITS - 1, wide)),
        "over_one": _word(_power(8 * size_bytes - _BITS - 1, wide)),
    }
    return f"    {{\n{_lines(fields)}    }},\n"


def _lines(fields: Mapping[str, str]) -> str:
    return "".join(f"        .{field} = {value},\n" for field, value in fields.items())


def _pair_over(distance: int, polynomial: int) -> str:
    """Of 16 bytes the first 8 stand 64 places higher. Products of reversed words are one place too high, hence the -1."""
    first, second = (_word(_power(8 * distance + more - 1, polynomial)) for more in (_BITS, 0))
    return f"{{{first}, {second}}}"


def _widened(polynomial: int) -> int:
    return polynomial << _BITS + 1 - polynomial.bit_length()


def _word(value: int) -> str:
    return f"{_reversed(value):#018x}"


def _reversed(value: int) -> int:
    return int(f"{value:0{_BITS}b}"[::-1], 2)


def _power(exponent: int, polynomial: int) -> int:
    """That power of x, modulo the polynomial."""
    power = 1
    for bit in f"{exponent:b}":
        power = _remainder(_product(power, power) << int(bit), polynomial)
    return power


def _product(a: int, b: int) -> int:
    product = 0
    for place in range(b.bit_length()):
        product ^= (a << place) * (b >> place & 1)
    return product


def _remainder(value: int, polynomial: int) -> int:
    return _divided(value, polynomial)[1]


def _quotient(value: int, polynomial: int) -> int:
    return _divided(value, polynomial)[0]


def _divided(value: int, polynomial: int) -> tuple[int, int]:
    quotient = 0
    while (shift := value.bit_length() - polynomial.bit_length()) >= 0:
        quotient |= 1 << shift
        value ^= polynomial << shift
    return quotient, value


if __name__ == "__main__":
    run_tool(main)
