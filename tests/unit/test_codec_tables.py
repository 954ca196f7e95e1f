"""The committed tables of the entropy coder: part of the frame format, so nothing in them may change."""

from __future__ import annotations

import math

import pytest
from blake3 import blake3
from rans_reference import committed

_TOTAL = 4096
_TABLES = 64
_GAUSSIANS = 32
_EQ_LARGEST = 127

_DIGESTS = {
    "tables_xa.cuh": "c999c91feaa678d00d2301acfce20d55dcc3618a10224e4e3cc6ce1aac5e1d20",
    "tables_eq.cuh": "7145919793eb169137137600815ba5ef8ae82f6443100074676179c077faafa8",
    "tables_cost.cuh": "63d18506ffda3cfac27e78d48c35e3fcbc93976a732205b36e59651790dfecc6",
}


@pytest.mark.parametrize("name", _DIGESTS)
def test_the_numbers_are_those_of_the_format(name: str) -> None:
    stated, rows = committed(name)
    packed = b"".join(number.to_bytes(2, "little") for row in rows for number in row)
    assert blake3(packed).hexdigest() == stated == _DIGESTS[name]


def test_frequencies_leave_one_slot_for_the_escape() -> None:
    _, xa = committed("tables_xa.cuh")
    _, eq = committed("tables_eq.cuh")
    assert [len(row) for row in xa] == [24] * _TABLES
    assert [len(row) for row in eq] == [_EQ_LARGEST + 1] * _TABLES
    assert {sum(row) for row in xa} == {_TOTAL - 1}
    assert {2 * sum(row) - row[0] for row in eq} == {_TOTAL - 1}


def test_frequencies_are_those_of_the_definition() -> None:
    """In plain floats: no number that was rounded is so close to a half that they could decide otherwise."""
    _, xa = committed("tables_xa.cuh")
    _, eq = committed("tables_eq.cuh")
    assert [_integers(_distances(table), [1] * 24) for table in range(_TABLES)] == xa
    assert [_integers(_magnitudes(table), [1] + [2] * _EQ_LARGEST) for table in range(_TABLES)] == eq


def test_costs_are_those_of_the_definition() -> None:
    _, rows = committed("tables_cost.cuh")
    found = [cost for row in rows for cost in row]
    assert found[0] == found[1] == 12 * 1024
    assert found[1:] == [round(-1024 * math.log2(f / _TOTAL)) for f in range(1, _TOTAL)]


def _distances(table: int) -> list[float]:
    below = [math.erf(2.0**-d / (2.0 ** (-table / 4) * math.sqrt(2))) for d in range(25)]
    return [(below[d] - below[d + 1]) / below[0] for d in range(24)]


def _magnitudes(table: int) -> list[float]:
    sigma = 2.0 ** ((table % _GAUSSIANS - 8) / 4)

    def beyond(bound: float) -> float:
        gaussian = table < _GAUSSIANS
        return math.erfc(bound / (sigma * math.sqrt(2))) if gaussian else math.exp(-bound * math.sqrt(2) / sigma)

    tails = [beyond(q + 0.5) for q in range(_EQ_LARGEST + 1)]
    return [1 - tails[0], *((tails[q - 1] - tails[q]) / 2 for q in range(1, _EQ_LARGEST + 1))]


def _integers(probabilities: list[float], counts: list[int]) -> list[int]:
    weights = [max(1.0, p * _TOTAL) if p >= 1 / (2 * _TOTAL) else 0.0 for p in probabilities]
    scale = (_TOTAL - 1) / math.fsum(w * n for w, n in zip(weights, counts, strict=True))
    found = [max(1, round(w * scale)) if w else 0 for w in weights]
    found[probabilities.index(max(probabilities))] += (
        _TOTAL - 1 - sum(f * n for f, n in zip(found, counts, strict=True))
    )
    return found
