"""Breadth-first exploration of the protocol's model: safety with a shortest counterexample, then liveness backwards.

Run by itself it explores one configuration: python tests/model/explore.py [--large] [--limit N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from typing import NamedTuple

from protocol_model import Model, State


class Exploration(NamedTuple):
    """What an exploration found: states seen, the broken invariant and the steps to it, states that nothing can clean."""

    states: int
    violation: str | None
    trace: tuple[str, ...]
    stuck: int


def explore(model: Model, *, liveness: bool = True, limit: int | None = None) -> Exploration:
    """Breadth first over all states, so a counterexample is a shortest one; then backwards from the empty ones.

    Collectors are alike and so are holders: states that differ in their order alone are one. `limit` bounds the states (the
    result then counts as many as were seen).
    """
    start = model.start()
    came_from: dict[State, tuple[State, str] | None] = {start: None}
    parents_of: dict[State, list[State]] = {}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        broken = model.violation(state)
        if broken is not None:
            return Exploration(len(came_from), broken, _trace(came_from, state), 0)
        for name, raw in model.steps(state):
            following = raw._replace(collectors=tuple(sorted(raw.collectors)), holders=tuple(sorted(raw.holders)))
            if following not in came_from:
                if limit is not None and len(came_from) >= limit:
                    continue
                came_from[following] = (state, name)
                queue.append(following)
            if liveness:
                parents_of.setdefault(following, []).append(state)
    stuck = len(came_from) - _can_be_cleaned(model, came_from, parents_of) if liveness else 0
    return Exploration(len(came_from), None, (), stuck)


def _can_be_cleaned(
    model: Model, states: dict[State, tuple[State, str] | None], parents_of: dict[State, list[State]]
) -> int:
    reached = {state for state in states if model.is_empty(state)}
    queue = deque(reached)
    while queue:
        for before in parents_of.get(queue.popleft(), ()):
            if before not in reached:
                reached.add(before)
                queue.append(before)
    return len(reached)


def _trace(came_from: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    steps: list[str] = []
    while (link := came_from[state]) is not None:
        state, name = link
        steps.append(name)
    return tuple(reversed(steps))


LARGE = Model(keys=3, writers=2, holders=2, collectors=3, uploads=4, grants=2, deletes=2, losses=1)


def main() -> None:
    """Explore and print."""
    parser = argparse.ArgumentParser(description="Explore the lease and gc protocol")
    parser.add_argument("--large", action="store_true", help="chain 3, 2 writers, 2 holders, 3 collectors")
    parser.add_argument("--limit", type=int, help="stop after so many states")
    options = parser.parse_args()
    model = LARGE if options.large else Model()
    began = time.monotonic()
    found = explore(model, liveness=not options.large, limit=options.limit)
    result = found.violation or "safe"
    sys.stdout.write(f"{found.states:,} states in {time.monotonic() - began:.0f} s: {result}, {found.stuck} stuck\n")
    for step in found.trace:
        sys.stdout.write(f"   {step}\n")


if __name__ == "__main__":
    main()
