"""Figures of the last minute, from counters that only grow: what an operator looks at first."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

WINDOW_SECONDS: Final = 60.0


class Rates:
    """Keeps a sample of the counters at every call and compares with one from a minute ago. Event-loop-only."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, dict[str, float]]] = deque()

    def update(self, now: float, counters: Mapping[str, float]) -> dict[str, float]:
        """Take a sample; per-second growth of each counter since the oldest sample of the window."""
        self._samples.append((now, dict(counters)))
        while len(self._samples) > 2 and now - self._samples[1][0] > WINDOW_SECONDS:  # noqa: PLR2004 - a span has two ends
            self._samples.popleft()
        then, earlier = self._samples[0]
        span = now - then
        if span <= 0:
            return dict.fromkeys(counters, 0.0)
        return {name: (value - earlier.get(name, 0.0)) / span for name, value in counters.items()}
