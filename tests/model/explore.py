"""Breadth-first exploration of the protocol's model: safety with a shortest counterexample, then liveness backwards.

Run by itself it explores one configuration: python tests/model/explore.py [--large] [--limit N]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import NamedTuple

from protocol_model import Model, State, Writer


class Exploration(NamedTuple):
    """What an exploration found: states seen, the broken invariant and the steps to it, states that nothing can clean."""

    states: int
    violation: str | None
    trace: tuple[str, ...]
    stuck: int


def explore(model: Model, *, liveness: bool = True, limit: int | None = None) -> Exploration:
    """Breadth first over all states, so a counterexample is a shortest one; then backwards from the empty ones.

    States that are alike (see `representative`) are one. `limit` bounds the states (the result then counts as many as were
    seen).
    """
    with _without_garbage_collection():
        return _explore(model, liveness=liveness, limit=limit)


def representative(state: State) -> State:
    """Collectors are alike, and so are holders and writers: of the states that differ in their order alone, one."""
    collectors, holders = tuple(sorted(state.collectors)), tuple(sorted(state.holders))
    if collectors != state.collectors or holders != state.holders:
        state = state._replace(collectors=collectors, holders=holders)
    if len(state.writers) == 1:
        return state
    writers, blobs = min(_orders_of_writers(state))
    if writers == state.writers and state.blobs.issuperset(blobs):
        return state
    return state._replace(writers=writers, blobs=frozenset(blobs))


def _orders_of_writers(state: State) -> Iterator[tuple[tuple[Writer, ...], list[tuple[int, int]]]]:
    for order in permutations(range(len(state.writers))):
        place = {number: at for at, number in enumerate(order)}
        writers = tuple(state.writers[number] for number in order)
        yield writers, sorted((blob, place[number]) for blob, number in state.blobs)


def _explore(model: Model, *, liveness: bool, limit: int | None) -> Exploration:
    start = representative(model.start())
    number_of: dict[State, int] = {start: 0}
    states = [start]
    came_from: list[tuple[int, str] | None] = [None]
    before: list[list[int]] = [[]]
    for number, state in enumerate(states):  # it grows meanwhile, in the order of discovery
        broken = model.violation(state)
        if broken is not None:
            return Exploration(len(states), broken, _trace(came_from, number), 0)
        for name, raw in model.steps(state):
            following = representative(raw)
            at = number_of.get(following)
            if at is None:
                at = len(states)
                if limit is not None and at >= limit:
                    continue
                number_of[following] = at
                states.append(following)
                came_from.append((number, name))
                before.append([])
            if liveness:
                before[at].append(number)
    stuck = len(states) - _can_be_cleaned(model, states, before) if liveness else 0
    return Exploration(len(states), None, (), stuck)


def _can_be_cleaned(model: Model, states: list[State], before: list[list[int]]) -> int:
    """How many states an empty one can be reached from."""
    reached = [number for number, state in enumerate(states) if model.is_empty(state)]
    is_reached = bytearray(len(states))
    for number in reached:
        is_reached[number] = 1
    for number in reached:  # it grows meanwhile
        for earlier in before[number]:
            if not is_reached[earlier]:
                is_reached[earlier] = 1
                reached.append(earlier)
    return len(reached)


def _trace(came_from: list[tuple[int, str] | None], number: int) -> tuple[str, ...]:
    steps: list[str] = []
    while (link := came_from[number]) is not None:
        number, name = link
        steps.append(name)
    return tuple(reversed(steps))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """States are millions of tuples without a cycle: looking for one again and again is a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
