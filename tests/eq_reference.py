"""What `kvobj/tensors/eq.py` says, slowly: numbers by numpy and Python's integers, streams a lane at a time."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cache
from math import frexp

import numpy as np
import numpy.typing as npt
from kernel_blocks import Words, values_of, words_of

from kvobj.tensors.kernels import build

F32 = np.float32
Integers = npt.NDArray[np.int64]
LANES = 32
ESCAPE = 255


@dataclass(frozen=True)
class Numbers:
    """Of one block: guarded tokens, words of means [head][dim] and steps, integers of the rung, and what they decode to."""

    guards: list[int]
    means: Words
    steps: Words
    integers: Integers
    decoded: Words
    shrinks: bool


def numbers_of(words: Words, base_step: int, rung: int, dtype: str = "bf16") -> Numbers:
    """Of finite words [head][token][dim] within the range that `eq` takes."""
    values = values_of(words, dtype)
    heads, tokens, dim = words.shape
    exponents = [frexp(float(np.abs(head).max()))[1] - 1 if head.any() else 0 for head in values]
    grid = np.array([2.0 ** (14 - e) for e in exponents])[:, None, None]
    on_grid = np.trunc(values.astype(np.float64) * grid).astype(np.int64)
    guards = _guards(on_grid, values, exponents)
    others = [t for t in range(tokens) if t not in set(guards)]
    means, steps = np.zeros((heads, dim), np.uint16), np.zeros(heads, np.uint16)
    for head, e in enumerate(exponents):
        unit = F32(2.0 ** (e - 14))
        sums = on_grid[head, others].sum(axis=0)
        means[head] = words_of(sums.astype(F32) * (F32(1) / F32(len(others))) * unit)
        if not values[head].any():
            continue
        centres = np.trunc(values_of(means[head]).astype(np.float64) * 2.0 ** (14 - e)).astype(np.int64)
        squares = int(((on_grid[head, others] - centres) ** 2).sum())
        shift = max(0, -(-(squares.bit_length() - 24) // 2) * 2)
        root = np.sqrt(F32(squares >> shift) * (F32(1) / F32(len(others) * dim))) * F32(2 ** (shift // 2))
        steps[head] = words_of(np.array([F32(base_step / 1000) * max(root, F32(1)) * unit]))[0]
    step, mean = values_of(steps)[:, None, None], values_of(means)[:, None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = (values - mean) * (F32(1) / step)
    base = np.sign(scaled) * np.floor(np.abs(np.where(step > 0, scaled, 0)).astype(np.float64) + 0.5)
    integers = np.where(step > 0, base, 0).astype(np.int64)
    integers[:, guards] = 0
    escapes = int((np.abs(integers) > 127).sum())
    count, columns = words.size, heads * dim
    most = heads * (6 + 2 * dim) + 2 + len(guards) * (2 + 2 * columns) + 192 * heads + columns
    shrinks = most + (12 * count + 17 * escapes + 7) // 8 < 2 * count
    for _ in range(rung):
        integers = np.sign(integers) * ((np.abs(integers) + 1) // 3)
    back = integers.astype(F32) * (step * F32(3**rung)) + mean
    decoded = words_of(back, dtype)
    decoded[:, guards] = words[:, guards]
    return Numbers(guards, means, steps, integers, decoded, shrinks)


def _guards(on_grid: Integers, values: npt.NDArray[np.float32], exponents: list[int]) -> list[int]:
    largest = max((e for e, head in zip(exponents, values, strict=True) if head.any()), default=0)
    norms = np.zeros(on_grid.shape[1], np.int64)
    for head, e in enumerate(exponents):
        norms += (on_grid[head] ** 2).sum(axis=1) >> min(62, 2 * (largest - e) if values[head].any() else 0)
    median = sorted(norms.tolist())[(len(norms) - 1) // 2]
    found = [t for t, n in enumerate(norms.tolist()) if 100 * n < 9 * median or n > 9 * median]
    return found if len(found) <= len(norms) // 16 else []


@dataclass(frozen=True)
class Block:
    """The parts of an encoded block; integers and table ids from the streams."""

    guards: list[int]
    means: Words
    steps: Words
    rows: Words
    ids: list[list[int]]
    integers: Integers


def parsed(block: bytes, heads: int, tokens: int, dim: int) -> Block:
    """Take a block apart. ValueError where a stream is none."""
    ends = struct.unpack_from(f"<{heads}I", block)
    at = 4 * heads
    steps = np.frombuffer(block, "<u2", heads, at)
    means = np.frombuffer(block, "<u2", heads * dim, at + 2 * heads).reshape(heads, dim)
    at += 2 * heads + 2 * heads * dim
    count = int.from_bytes(block[at : at + 2], "little")
    guards = list(struct.unpack_from(f"<{count}H", block, at + 2))
    at += 2 + 2 * count
    rows = np.frombuffer(block, "<u2", count * heads * dim, at).reshape(count, heads, dim)
    at += 2 * count * heads * dim
    streams = [block[at + start : at + end] for start, end in zip((0, *ends), ends, strict=False)]
    if at + ends[-1] != len(block):
        raise ValueError("streams do not end with the block")
    found = [read_stream(stream, tokens * dim, dim) for stream in streams]
    integers = np.array([values for _, values in found]).reshape(heads, tokens, dim)
    return Block(guards, means, steps, rows, [ids for ids, _ in found], integers)


@cache
def _numbers(name: str) -> list[int]:
    text = (build.DIRECTORY / name).read_text()
    lines = (line for line in text.splitlines() if not line.startswith("//"))
    return [int(number) for number in re.findall(r"\d+", "\n".join(lines))]


@cache
def frequencies(table: int) -> list[int]:
    """Of -127 to 127, and of the escape."""
    half = _numbers("tables_eq.cuh")[128 * table : 128 * (table + 1)]
    return [*reversed(half[1:]), *half, 1]


@cache
def slots(table: int) -> list[tuple[int, int, int]]:
    """Symbol, frequency and first slot of each slot."""
    found: list[tuple[int, int, int]] = []
    for symbol, f in enumerate(frequencies(table)):
        first = len(found)
        found += [(symbol, f, first)] * f
    return found


def cheapest(column: Integers) -> int:
    """The table that a column's integers cost least by."""
    costs = _numbers("tables_cost.cuh")
    sizes = np.minimum(np.abs(column), 128).tolist()

    def cost(table: int) -> int:
        by_symbol = frequencies(table)
        each = [by_symbol[127 + size] if size < 128 else 0 for size in range(129)]
        return sum(costs[each[size]] + (0 if each[size] else 16 * 1024) for size in sizes)

    return min(range(64), key=cost)


class _Reader:
    """States and words of a stream."""

    def __init__(self, stream: bytes) -> None:
        words = np.frombuffer(stream, "<u2").tolist()
        self.states = [low | high << 16 for low, high in zip(words[:LANES], words[LANES : 2 * LANES], strict=True)]
        self.left = words[2 * LANES :]
        self.is_rest = False

    def rest(self) -> None:
        """Before each step, and at the end."""
        if not self.left and not self.is_rest:
            self.states = [state - 65536 for state in self.states]
            self.is_rest = True

    def step(self, tables: list[list[tuple[int, int, int]]]) -> list[int]:
        """Symbols of the first lanes, given each one's table."""
        self.rest()
        found = []
        for lane, table in enumerate(tables):
            slot = self.states[lane] % 4096
            symbol, f, first = table[slot]
            self.states[lane] = f * (self.states[lane] >> 12) + slot - first
            found.append(symbol)
        for lane in range(len(tables)):
            if self.states[lane] < 65536 and not self.is_rest:
                self.states[lane] = self.states[lane] << 16 | self.left.pop(0)
        return found


def read_stream(stream: bytes, count: int, dim: int) -> tuple[list[int], list[int]]:
    """Table ids and integers. ValueError for what is no stream."""
    reader = _Reader(stream)
    of_ids = [(slot // 64, 64, slot // 64 * 64) for slot in range(4096)]
    ids: list[int] = []
    for at in range(0, dim, LANES):
        ids += reader.step([of_ids] * min(LANES, dim - at))
    values: list[int] = []
    for at in range(0, count, LANES):
        for symbol in reader.step([slots(ids[i % dim]) for i in range(at, min(at + LANES, count))]):
            raw = reader.left.pop(0) if symbol == ESCAPE else 0
            values.append((raw ^ 0x8000) - 0x8000 if symbol == ESCAPE else symbol - 127)
    reader.rest()
    if any(reader.states) or reader.left or not reader.is_rest:
        raise ValueError("no stream")
    return ids, values
