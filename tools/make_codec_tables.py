"""The static tables of the entropy coder (`xa`, `eq`, `ek`) from their definitions: what `kvobj/tensors/kernels/tables_*.cuh` hold.

The integers are part of the frame format and are never computed anew: this shows where they came from, and `--check` whether it
still gives the committed ones. Probabilities are decimals of 60 digits, while no number that is rounded lies closer than 4e-5 to
a half (the least distance is printed): no rounding of these computations decided an integer, and any other program that is good
to 10 digits gives the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from functools import cache
from pathlib import Path
from typing import Final

from blake3 import blake3
from command_line import Parser, run_tool

DIRECTORY: Final = Path(__file__).parent.parent / "kvobj" / "tensors" / "kernels"
TABLES: Final = 64
TOTAL: Final = 4096
"""What the frequencies of a table sum to."""
XA_SYMBOLS: Final = 24
"""Distances 0 to 23 from the largest exponent; one more symbol is the escape, of frequency 1 in every table."""
EQ_LARGEST: Final = 127
"""Integers -127 to 127; one more symbol is the escape."""
BIT: Final = 1024
"""Costs are in this part of a bit."""

_DIGITS: Final = 60
_GAUSSIANS: Final = 32
_ONE: Final = Decimal(1)
_HALF: Final = Decimal("0.5")
_nearest_half: Decimal = _HALF


def main() -> int:
    """Write the files, or with `--check` compare."""
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a file differs")
    check: bool = parser.parse_args().check
    with localcontext() as context:
        context.prec = _DIGITS
        files = {
            "tables_xa.cuh": _file(_XA_TEXT, xa_frequencies()),
            "tables_eq.cuh": _file(_EQ_TEXT, eq_frequencies()),
            "tables_cost.cuh": _file(_COST_TEXT, [costs()[at : at + 32] for at in range(0, TOTAL, 32)]),
        }
    sys.stdout.write(f"least distance of a rounded value from a half: {_nearest_half:.3e}\n")
    differ = [name for name, text in files.items() if (DIRECTORY / name).read_text() != text] if check else []
    for name, text in files.items():
        if not check:
            (DIRECTORY / name).write_text(text)
        sys.stdout.write(f"{name}: {'DIFFERS' if name in differ else 'ok'}\n")
    return 1 if differ else 0


_XA_TEXT: Final = """\
// Frequencies of xa's static tables: a row a table j, of 24 symbols d: P(2^-(d+1) <= |x| < 2^-d) of a Gaussian of sigma 2^(-j/4),
// given |x| < 1. Each row and the escape, whose frequency is 1, sum to 4096; 0: such a distance is escaped.
"""
_EQ_TEXT: Final = """\
// Frequencies of eq's static tables: a row a table, of 128 symbols |q|; -q has the frequency of q. Rows 0 to 31 are Gaussians, 32
// to 63 Laplacians, of sigma 2^((row % 32 - 8) / 4), over [q - 1/2, q + 1/2]. A row, with both signs, and the escape, whose
// frequency is 1, sum to 4096; 0: such an integer is escaped.
"""
_COST_TEXT: Final = """\
// What a symbol of frequency f costs for the choice of a table, in 1/1024 bit: round(1024 * -log2(f / 4096)) at place f; place 0
// is that of an escape, which costs its raw bits besides.
"""
_NOTE: Final = """\
// Part of the frame format: never changed. Made by tools/make_codec_tables.py; BLAKE3 of the numbers as little-endian u16:
// {digest}
"""


def _file(text: str, rows: Sequence[Sequence[int]]) -> str:
    packed = b"".join(number.to_bytes(2, "little") for row in rows for number in row)
    lines = (", ".join(map(str, row)) + ",\n" for row in rows)
    return text + _NOTE.format(digest=blake3(packed).hexdigest()) + "".join(lines)


def xa_frequencies() -> list[list[int]]:
    """[table][distance]."""
    return [_integers(_distances(table), [1] * XA_SYMBOLS) for table in range(TABLES)]


def eq_frequencies() -> list[list[int]]:
    """[table][|q|]."""
    return [_integers(_magnitudes(table), [1] + [2] * EQ_LARGEST) for table in range(TABLES)]


def costs() -> list[int]:
    """[frequency], of 0 to 4,095."""
    with localcontext() as context:
        context.prec = _DIGITS
        two = Decimal(2).ln()
        return [_rounded(BIT * (Decimal(TOTAL) / max(1, f)).ln() / two) for f in range(TOTAL)]


def _distances(table: int) -> list[Decimal]:
    scale = Decimal(2) ** (Decimal(-table) / 4) * Decimal(2).sqrt()
    below = [_erf(Decimal(2) ** -d / scale) for d in range(XA_SYMBOLS + 1)]
    return [(below[d] - below[d + 1]) / below[0] for d in range(XA_SYMBOLS)]


def _magnitudes(table: int) -> list[Decimal]:
    """Probabilities of 0, 1, … 127; the mass beyond is escaped."""
    sigma = Decimal(2) ** (Decimal(table % _GAUSSIANS - 8) / 4)

    def within(bound: Decimal) -> Decimal:
        """P(|X| < bound)."""
        if table < _GAUSSIANS:
            return _erf(bound / (sigma * Decimal(2).sqrt()))
        return _ONE - (-bound * Decimal(2).sqrt() / sigma).exp()

    bounds = [within(q + _HALF) for q in range(EQ_LARGEST + 1)]
    return [bounds[0], *((bounds[q] - bounds[q - 1]) / 2 for q in range(1, EQ_LARGEST + 1))]


def _integers(probabilities: Sequence[Decimal], counts: Sequence[int]) -> list[int]:
    """Frequencies of symbols, `counts` of each of which there are: below 1/8,192 none, else at least 1; scaled to leave 1 for the
    escape; the remainder goes to the likeliest, of which there must be one."""
    weights = [max(_ONE, p * TOTAL) if p * 2 * TOTAL >= 1 else Decimal(0) for p in probabilities]
    scale = (TOTAL - 1) / sum((w * n for w, n in zip(weights, counts, strict=True)), Decimal(0))
    found = [max(1, _rounded(weight * scale)) if weight else 0 for weight in weights]
    likeliest = max(range(len(found)), key=lambda symbol: probabilities[symbol])
    if counts[likeliest] != 1:
        raise ValueError("the remainder cannot be shared by symbols of one frequency")
    found[likeliest] += TOTAL - 1 - sum(f * n for f, n in zip(found, counts, strict=True))
    return found


def _rounded(value: Decimal) -> int:
    """To the nearest integer; notes how far from a half it was."""
    global _nearest_half  # noqa: PLW0603 - what a person reads at the end
    _nearest_half = min(_nearest_half, abs(value % 1 - _HALF))
    return int(value.quantize(_ONE, rounding=ROUND_HALF_EVEN))


@cache
def _root_of_pi() -> Decimal:
    """From Machin: pi = 16 atan(1/5) - 4 atan(1/239)."""
    return (16 * _arctangent_of_part(5) - 4 * _arctangent_of_part(239)).sqrt()


def _arctangent_of_part(whole: int) -> Decimal:
    return _sum_of(
        (_ONE if n % 2 == 0 else -_ONE) / ((2 * n + 1) * Decimal(whole) ** (2 * n + 1)) for n in range(10_000)
    )


def _erf(x: Decimal) -> Decimal:
    """2/sqrt(pi) exp(-x^2) * sum of 2^n x^(2n+1) / (1*3*...*(2n+1)), all positive; 1 from 12 on, where 1e-64 is left."""
    if x >= 12:  # noqa: PLR2004
        return _ONE

    def terms() -> Iterable[Decimal]:
        term, n = x, 0
        while True:
            yield term
            n += 1
            term = term * 2 * x * x / (2 * n + 1)

    return 2 / _root_of_pi() * (-x * x).exp() * _sum_of(terms())


def _sum_of(terms: Iterable[Decimal]) -> Decimal:
    """Until a term no longer changes the sum. Terms may grow at first, but not after one that vanishes."""
    total = Decimal(0)
    for term in terms:
        before, total = total, total + term
        if total == before:
            return total
    raise ValueError("a sum does not end")


if __name__ == "__main__":
    run_tool(main)
