"""Streams of the entropy coder as `kernels/rans.cuh` describes them, lane by lane in plain Python: what kernels are held to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import kvobj.tensors.kernels

LANES: Final = 32
TOTAL: Final = 4096
ESCAPE: Final = 255
ID_FREQUENCY: Final = 64
_LOW: Final = 1 << 16
_DIRECTORY: Final = Path(kvobj.tensors.kernels.__file__).parent


def committed(name: str) -> tuple[str, list[list[int]]]:
    """A file of tables: the BLAKE3 that it states, and its rows."""
    text = (_DIRECTORY / name).read_text()
    rows = [
        [int(number) for number in line.split(",") if number.strip()]
        for line in text.splitlines()
        if not line.startswith("//")
    ]
    return re.findall(r"^// ([0-9a-f]{64})$", text, re.MULTILINE)[0], rows


@dataclass(frozen=True, slots=True)
class Alphabet:
    """64 tables. `frequencies[table]` maps a symbol to its frequency, in the order of the slots; what it lacks is escaped."""

    frequencies: Sequence[Mapping[int, int]]

    def placed(self, table: int, symbol: int) -> tuple[int, int, bool]:
        """Frequency, first slot, and whether that is the escape's."""
        first = 0
        for other, frequency in self.frequencies[table].items():
            if other == symbol and other != ESCAPE:
                return frequency, first, False
            first += frequency
        return 1, TOTAL - 1, True

    def symbol_at(self, table: int, slot: int) -> tuple[int, int, int]:
        """Symbol, frequency, first slot."""
        first = 0
        for symbol, frequency in self.frequencies[table].items():
            if slot < first + frequency:
                return symbol, frequency, first
            first += frequency
        raise AssertionError(slot)

    def cheapest(self, symbols: Sequence[int], costs: Sequence[int]) -> int:
        """The table of a column of these symbols."""

        def cost(table: int) -> int:
            placed = (self.placed(table, symbol) for symbol in symbols)
            return sum(costs[0] + 16 * 1024 if escaped else costs[frequency] for frequency, _, escaped in placed)

        return min(range(len(self.frequencies)), key=lambda table: (cost(table), table))


def xa_alphabet() -> Alphabet:
    """Distances 0 to 23."""
    _, rows = committed("tables_xa.cuh")
    return Alphabet([{**{d: f for d, f in enumerate(row) if f}, ESCAPE: 1} for row in rows])


def costs() -> list[int]:
    """By frequency, in 1/1024 bit; 0 stands for the escape."""
    _, rows = committed("tables_cost.cuh")
    return [cost for row in rows for cost in row]


def encode_stream(alphabet: Alphabet, ids: Sequence[int], symbols: Sequence[int], raw: Sequence[int]) -> bytes:
    """The stream of a run of symbols; `raw[i]` is the word of an escaped one."""
    ids_put = [(ID_FREQUENCY, ID_FREQUENCY * table, None) for table in ids]
    steps: list[list[tuple[int, int, int | None]]] = [[*ids_put[at : at + LANES]] for at in range(0, len(ids), LANES)]
    for first in range(0, len(symbols), LANES):
        step: list[tuple[int, int, int | None]] = []
        for i in range(first, min(first + LANES, len(symbols))):
            frequency, slot, escaped = alphabet.placed(ids[i % len(ids)], symbols[i])
            step.append((frequency, slot, raw[i] if escaped else None))
        steps.append(step)

    states, words, is_rest = [0] * LANES, list[int](), True
    for step in reversed(steps):
        escapes = [word for *_, word in step if word is not None]
        needs_word = any(states[lane] + _LOW >= frequency << 20 for lane, (frequency, *_) in enumerate(step))
        if is_rest and (escapes or needs_word):
            states, is_rest = [x + _LOW for x in states], False
        pushed = []
        for lane, (frequency, slot, _) in enumerate(step):
            if not is_rest and states[lane] >= frequency << 20:
                pushed.append(states[lane] & 0xFFFF)
                states[lane] >>= 16
            whole, part = divmod(states[lane], frequency)
            states[lane] = whole * TOTAL + part + slot
        words[:0] = pushed + escapes
    if is_rest:
        states = [x + _LOW for x in states]
    found = [x & 0xFFFF for x in states] + [x >> 16 for x in states] + words
    return b"".join(word.to_bytes(2, "little") for word in found)


def decode_stream(
    alphabet: Alphabet, data: bytes, columns: int, values: int
) -> tuple[list[int], list[int], dict[int, int]]:
    """Ids, symbols, and the raw words of those that are escaped. ValueError for what is no stream."""
    reader = _Reader(data)
    slots = reader.steps(columns, lambda _, slot: (ID_FREQUENCY, slot // ID_FREQUENCY * ID_FREQUENCY))
    ids = [slot // ID_FREQUENCY for slot in slots]
    symbols: list[int] = []
    raw: dict[int, int] = {}

    def placed(i: int, slot: int) -> tuple[int, int]:
        symbol, frequency, first = alphabet.symbol_at(ids[i % columns], slot)
        symbols.append(symbol)
        return frequency, first

    def escapes(step: range) -> None:
        raw.update({i: reader.word() for i in step if symbols[i] == ESCAPE})

    reader.steps(values, placed, escapes)
    reader.finish()
    return ids, symbols, raw


class _Reader:
    def __init__(self, data: bytes) -> None:
        found = [int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2)]
        self._states = [low | high << 16 for low, high in zip(found[:LANES], found[LANES : 2 * LANES], strict=True)]
        self._words = found[2 * LANES :]
        self._is_rest = False

    def steps(
        self, count: int, placed: Callable[[int, int], tuple[int, int]], after: Callable[[range], None] = lambda _: None
    ) -> list[int]:
        """The slots of so many values; `placed` says frequency and first slot of the one at a slot, `after` ends a step."""
        slots: list[int] = []
        for begin in range(0, count, LANES):
            self._rest()
            step = range(begin, min(begin + LANES, count))
            for lane, i in enumerate(step):
                state = self._states[lane]
                slots.append(state % TOTAL)
                frequency, first = placed(i, slots[-1])
                self._states[lane] = frequency * (state // TOTAL) + slots[-1] - first
            for lane in range(len(step)):
                if not self._is_rest and self._states[lane] < _LOW:
                    self._states[lane] = self._states[lane] << 16 | self.word()
            after(step)
        return slots

    def word(self) -> int:
        """The next one."""
        if not self._words:
            raise ValueError("a word is missing")
        return self._words.pop(0)

    def finish(self) -> None:
        """Is at the end."""
        self._rest()
        if self._words or any(self._states):
            raise ValueError("not at the end")

    def _rest(self) -> None:
        if not self._words and not self._is_rest:
            self._states, self._is_rest = [x - _LOW for x in self._states], True
