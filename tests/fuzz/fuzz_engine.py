"""Runs the cases of one fuzz target: by number, each with a bound on its time, and says what was found.

A case is made of (seed, target, number) and the corpus alone, so that any of them is made again without those before it. A finding
is an exception that the target does not expect, a case that is slow or hangs, or a process that grows.
"""

from __future__ import annotations

import itertools
import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import FrameType
from typing import Final, Protocol

CASE_CPU_SECONDS: Final = 1.0
"""A case takes some 0.1 ms: one that takes this long is a finding. CPU time, so that a busy machine is none."""
CASE_WALL_SECONDS: Final = 20.0
"""After this long a case is interrupted: it hangs."""
GROWTH_KIB: Final = 256 * 1024
"""How much a run may add to the process's peak of memory."""
_LOOK_EVERY: Final = 1000


class Target(Protocol):
    """A parser, or what stands for many, and the cases it is given."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        ...

    @property
    def modules(self) -> tuple[str, ...]:
        """Whose branches it is to reach: files under kvobj/, or functions of them as `FILE:NAME`."""
        ...

    def seeds(self) -> list[bytes]:
        """Cases to run unchanged, from the corpus."""
        ...

    def make(self, random: Random) -> bytes:
        """One case more."""
        ...

    def run(self, case: bytes) -> str:
        """Run a case; what came of it in a word, for the statistics. Raises on a finding."""
        ...


class HangError(Exception):
    """A case did not end."""


class SlowCaseError(Exception):
    """A case ended, but took longer than any should."""


class GrowthError(Exception):
    """The process has grown over the cases up to this one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that must not be."""

    target: str
    number: int
    case: bytes
    what: str


@dataclass(slots=True)
class Statistics:
    """What a run of one target came to."""

    cases: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0
    slowest_seconds: float = 0.0
    slowest_number: int = -1
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


def make_case(target: Target, seed: int, number: int) -> bytes:
    """The case of that number."""
    return target.make(Random((seed << 40) + number))


def run_cases(
    target: Target,
    *,
    seed: int,
    numbers: Iterable[int],
    known: Sequence[bytes] = (),
    most_findings: int = 10,
    cpu_seconds: float = CASE_CPU_SECONDS,
    wall_seconds: float = CASE_WALL_SECONDS,
    on_progress: Callable[[Statistics], None] | None = None,
) -> Statistics:
    """Run the cases that are `known` (numbered -1, -2, …), then those of these numbers.

    Ends early once there are `most_findings`. `cpu_seconds` and `wall_seconds` bound a case. `on_progress` is called at times. Uses
    SIGALRM, and so the main thread.
    """
    statistics = Statistics()
    random = Random()
    began = time.perf_counter()
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _alarm(wall_seconds) as set_alarm:
        for number in itertools.chain(range(-1, -len(known) - 1, -1), numbers):
            if number < 0:
                case = known[-number - 1]
            else:
                random.seed((seed << 40) + number)
                case = target.make(random)
            problem = _run_case(target, case, number, statistics, set_alarm)
            if problem is None and statistics.last_seconds > cpu_seconds:
                problem = SlowCaseError(f"{statistics.last_seconds:.2f} s of CPU")
            if statistics.cases % _LOOK_EVERY == 0:
                grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib
                if grown_kib > GROWTH_KIB:
                    peak_kib += grown_kib
                    problem = problem or GrowthError(f"{grown_kib} KiB")
                if on_progress is not None:
                    statistics.seconds = time.perf_counter() - began
                    on_progress(statistics)
            if problem is not None:
                what = "".join(traceback.format_exception(problem))
                statistics.findings.append(Finding(target.name, number, case, what))
                if len(statistics.findings) >= most_findings:
                    break
    statistics.seconds = time.perf_counter() - began
    return statistics


def _run_case(
    target: Target,
    case: bytes,
    number: int,
    statistics: Statistics,
    set_alarm: Callable[[bool], None],
) -> Exception | None:
    """What the case raised, if it did; its time goes into `statistics`."""
    problem: Exception | None = None
    start = time.thread_time()
    try:
        set_alarm(True)
        statistics.outcomes[target.run(case)] += 1
        set_alarm(False)
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        set_alarm(False)
        problem = error
    took = time.thread_time() - start
    statistics.cases += 1
    statistics.last_seconds = took
    if took > statistics.slowest_seconds:
        statistics.slowest_seconds, statistics.slowest_number = took, number
    return problem


@contextmanager
def _alarm(seconds: float) -> Iterator[Callable[[bool], None]]:
    """A function that sets an alarm, which interrupts what runs by `HangError`, or takes it back."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise HangError

    def set_alarm(is_set: bool) -> None:  # noqa: FBT001 - a private function's only argument
        signal.setitimer(signal.ITIMER_REAL, seconds if is_set else 0)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        yield set_alarm
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
