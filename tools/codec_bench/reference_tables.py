"""The static tables of codecs.md §3.3 and §3.6 made from their definitions: what the committed integers are held against. Pure.

64 tables of integer frequencies that sum to 4,096 for each alphabet, and the cost of every symbol in 1/1,024 bits. Floats are
enough: no probability comes near enough to a rounding for their last digits to decide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import erf, erfc, exp, fsum, log2, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

TABLES: Final = 64
TOTAL: Final = 4096
COST_ONE_BIT: Final = 1024
XA_SYMBOLS: Final = 24
"""Exponents below a head's largest that have a symbol; one more symbol is the escape."""
EQ_LARGEST: Final = 127
"""Integers of `eq` with a symbol are -127..127; one more symbol is the escape."""
_GAUSSIANS: Final = 32

IntegerArray = npt.NDArray[np.int64]


@cache
def xa_frequencies() -> IntegerArray:
    """[64, 25] int64; symbol d < 24 is an exponent d below the largest, 24 the escape."""
    return np.array([_integers(_exponent_probabilities(table)) for table in range(TABLES)])


@cache
def eq_frequencies() -> IntegerArray:
    """[64, 256] int64; symbol q + 127, 255 the escape. Tables 0 to 31 are Gaussians, 32 to 63 Laplacians."""
    return np.array([_integers(_integer_probabilities(table)) for table in range(TABLES)])


def costs(frequencies: IntegerArray) -> IntegerArray:
    """round(1024 · -log2(f / 4096)), and a symbol that has no frequency costs what its table's escape costs."""
    of = [0, *(round(COST_ONE_BIT * -log2(f / TOTAL)) for f in range(1, TOTAL + 1))]
    table = np.array(of)[frequencies]
    return np.where(frequencies == 0, table[:, -1:], table)


def _exponent_probabilities(table: int) -> list[float]:
    """P(2^-(d+1) <= |x| < 2^-d) of a Gaussian of sigma 2^(-table/4), given |x| < 1."""
    scale = 2 ** (-table / 4) * sqrt(2)
    below = [erf(2**-d / scale) for d in range(XA_SYMBOLS + 1)]
    return [(below[d] - below[d + 1]) / below[0] for d in range(XA_SYMBOLS)]


def _integer_probabilities(table: int) -> list[float]:
    """The mass of [q - 1/2, q + 1/2] under a Gaussian or Laplacian of sigma 2^((i - 8)/4) steps."""
    sigma = 2 ** ((table % _GAUSSIANS - 8) / 4)

    def above(x: float) -> float:
        """P(X > x), x > 0; from the tail, which keeps its digits."""
        return erfc(x / (sigma * sqrt(2))) / 2 if table < _GAUSSIANS else exp(-x * sqrt(2) / sigma) / 2

    tails = [above(q + 0.5) for q in range(EQ_LARGEST + 1)]
    positive = [tails[q - 1] - tails[q] for q in range(1, EQ_LARGEST + 1)]
    return [*reversed(positive), 1 - 2 * tails[0], *positive]


def _integers(probabilities: Sequence[float]) -> list[int]:
    """Frequencies with the escape's 1 last: what is likelier than 1/8,192 has at least 1, the remainder goes to the likeliest."""
    weights = [max(1.0, p * TOTAL) if p * 2 * TOTAL >= 1 else 0.0 for p in probabilities]
    scale = (TOTAL - 1) / fsum(weights)
    found = [max(1, round(weight * scale)) if weight else 0 for weight in weights]
    likeliest = max(range(len(found)), key=lambda symbol: probabilities[symbol])
    found[likeliest] += TOTAL - 1 - sum(found)
    return [*found, 1]
