"""Counts of reuse by class and age, and the Gittins index made of them (`eviction.md` §3). Twin of `native/gipe_rank.h`.

Both round alike: the same operations on doubles in the same order.
"""

from __future__ import annotations

import math
from typing import Final

BUCKETS: Final = 40
USES: Final = 6
GAPS: Final = 8
HINTS: Final = 6
CLASSES: Final = USES * GAPS * HINTS
PARTIAL_GAP: Final = 7

TICK_MS: Final = 16
# Upper bounds of the age buckets in ticks: 2 s times 2**(j/2); the last bucket is open.
BOUNDS: Final = tuple(math.isqrt(125 * 125 << bucket) for bucket in range(BUCKETS - 1))
# 4, 16, 64, 256, 1024 s in ticks: the gaps that part one class of requests from the next.
GAP_BOUNDS: Final = (250, 1000, 4000, 16000, 64000)

PRIOR_WEIGHT: Final = 300.0
PRIOR_RATE: Final = 0.05
REFRESH_EVERY: Final = 2000
COUNT_MAX: Final = 1 << 31

_WIDTHS: Final = (
    *(float(bound - before) for before, bound in zip((0, *BOUNDS), BOUNDS, strict=False)),
    2.0 * BOUNDS[-1],
)


def class_of(uses: int, gap: int, hint: int) -> int:
    """The class of a chunk used `uses` times (from 1) by a request of this gap and hint."""
    return (hint * GAPS + gap) * USES + min(uses, USES) - 1


def gap_class(gap_ticks: int) -> int:
    """1..6 by the time since the known prefix was last used."""
    return 1 + sum(gap_ticks >= bound for bound in GAP_BOUNDS)


class Rank:
    """Counts that grow, and indexes that are made of them at each `refresh`."""

    def __init__(self) -> None:
        self.entered = [[0] * BUCKETS for _ in range(CLASSES)]
        self.ended = [[0] * BUCKETS for _ in range(CLASSES)]
        self._worth: list[list[float]] = []
        self.refresh()

    def worth(self, class_: int, bucket: int) -> float:
        """The index of a chunk of the class at that age: reuses a tick, at the best horizon."""
        return self._worth[class_][bucket]

    def count_entered(self, class_: int, bucket: int) -> None:
        """An interval of the class has reached the bucket."""
        self.entered[class_][bucket] += 1
        if self.entered[class_][bucket] == COUNT_MAX:
            self._halve()

    def count_ended(self, class_: int, bucket: int) -> None:
        """An interval of the class ended in the bucket: the chunk was used again."""
        self.ended[class_][bucket] += 1
        if self.ended[class_][bucket] == COUNT_MAX:
            self._halve()

    def _halve(self) -> None:
        for table in (self.entered, self.ended):
            table[:] = [[count >> 1 for count in row] for row in table]

    def refresh(self) -> None:
        """Make the indexes of the counts as they are now."""
        filled = [class_ for class_ in range(CLASSES) if self.entered[class_][0]]
        by_uses = self._rates_by_uses()
        none = [0] * BUCKETS
        plain = [_gittins(none, none, by_uses[uses]) for uses in range(USES)]
        self._worth = [plain[class_ % USES] for class_ in range(CLASSES)]
        for class_ in filled:
            self._worth[class_] = _gittins(self.entered[class_], self.ended[class_], by_uses[class_ % USES])

    def _rates_by_uses(self) -> list[list[float]]:
        entered = [[0] * BUCKETS for _ in range(USES)]
        ended = [[0] * BUCKETS for _ in range(USES)]
        for sums, table in ((entered, self.entered), (ended, self.ended)):
            for class_, row in enumerate(table):
                if any(row):
                    sums[class_ % USES] = [total + count for total, count in zip(sums[class_ % USES], row, strict=True)]
        k = PRIOR_WEIGHT
        by_uses: list[list[float]] = [[] for _ in range(USES)]
        for bucket in range(BUCKETS):
            all_entered = sum(row[bucket] for row in entered)
            all_ended = sum(row[bucket] for row in ended)
            pool = (all_ended + k * PRIOR_RATE) / (all_entered + k)
            for uses in range(USES):
                by_uses[uses].append((ended[uses][bucket] + k * pool) / (entered[uses][bucket] + k))
        return by_uses


def _gittins(entered: list[int], ended: list[int], rates: list[float]) -> list[float]:
    """The best attainable rate over all horizons, from the last bucket back: a stretch takes in the best stretch behind it
    for as long as that one has the higher rate."""
    worth = [0.0] * BUCKETS
    stack: list[tuple[float, float, float, float]] = []
    for bucket in range(BUCKETS - 1, -1, -1):
        p = min(0.999, (ended[bucket] + PRIOR_WEIGHT * rates[bucket]) / (entered[bucket] + PRIOR_WEIGHT))
        reward, cost, survival = p, _WIDTHS[bucket] * (1.0 - p / 2.0), 1.0 - p
        rate = reward / cost
        while stack and stack[-1][3] > rate:
            later_reward, later_cost, later_survival, _ = stack.pop()
            reward += survival * later_reward
            cost += survival * later_cost
            survival *= later_survival
            rate = reward / cost
        worth[bucket] = rate
        stack.append((reward, cost, survival, rate))
    return worth
