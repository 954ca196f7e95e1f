"""The short run of every fuzz target; the long one is `tools/fuzz_parsers.py`, its record docs/fuzzing.md."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fuzz_engine import Target, run_cases
from fuzz_message import CORPUS
from fuzz_targets import HANDLERS, TARGETS, known_cases
from server_process import REPOSITORY

CASES = 500
REACHED_CASES = 200
CORPUS_BYTES = 300 * 1024


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]()


def test_no_case_breaks_a_parser(target: Target) -> None:
    statistics = run_cases(target, seed=20_260_102, numbers=range(CASES), known=known_cases(target))
    assert [finding.what for finding in statistics.findings] == []
    assert statistics.cases == CASES + len(known_cases(target))
    assert len(statistics.outcomes) > 1 or target.name == "canonical", "every case came to the same"


def test_a_case_is_its_number(target: Target) -> None:
    first = run_cases(target, seed=5, numbers=range(20, 40))
    again = run_cases(TARGETS[target.name](), seed=5, numbers=[*range(30, 40), *range(20, 30)])
    assert first.outcomes == again.outcomes


class Doubtful:
    """A target that fails in each of the ways that are looked for."""

    name = "doubtful"
    modules = ()

    def seeds(self) -> list[bytes]:
        return []

    def make(self, random: object) -> bytes:
        del random
        return b""

    def run(self, case: bytes) -> str:
        if case == b"raises":
            raise KeyError(case)
        end = time.thread_time() + 0.2
        while case == b"hangs" or (case == b"slow" and time.thread_time() < end):
            pass
        return case.decode()


def test_what_is_raised_slow_or_without_an_end_is_found() -> None:
    known = [b"fine", b"raises", b"slow", b"hangs", b"fine"]
    statistics = run_cases(Doubtful(), seed=1, numbers=[], known=known, cpu_seconds=0.1, wall_seconds=1.5)
    raised, slow, hung = statistics.findings
    assert (raised.case, slow.case, hung.case) == (b"raises", b"slow", b"hangs")
    assert "KeyError" in raised.what
    assert "s of CPU" in slow.what
    assert "HangError" in hung.what
    assert statistics.outcomes == {"fine": 2, "slow": 1}


def test_the_corpus_and_a_short_run_reach_the_parsers(tmp_path: Path) -> None:
    command = [sys.executable, "tools/fuzz_parsers.py", "--coverage", "--cases", str(REACHED_CASES)]
    table = tmp_path / "reached.json"
    done = subprocess.run(
        [*command, "--table", str(table), "--findings", str(tmp_path)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "FINDING" not in done.stdout
    reached: dict[str, tuple[int, int]] = json.loads(table.read_text())
    parsers = {name: counts for name, counts in reached.items() if name not in HANDLERS}
    assert len(parsers) > 10, done.stdout + done.stderr
    assert sum(there for _, there in parsers.values()) >= 0.9 * sum(all_of_them for all_of_them, _ in parsers.values())


def test_the_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) <= CORPUS_BYTES
