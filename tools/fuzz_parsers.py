"""Feeds the parsers mutated requests of real clients: so many cases a target, from a seed, with what they came to.

A case is made of the seed, the target and its number alone: a finding is printed with the command that makes it again, and a run
goes on where another ended (--start). Findings are written to --findings; one that is mended belongs into
tests/fuzz/corpus/regressions. --coverage measures which branches of the parsers are reached (slower), --grow keeps the cases that
reach new ones. How the targets work stands in docs/fuzzing.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Final

from command_line import Parser, existing_file, one_or_more, output_file, run_tool, zero_or_more

REPOSITORY: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "fuzz")]

if TYPE_CHECKING:
    from fuzz_engine import Finding, Statistics, Target

PART: Final = 0.9
"""How much of the branches of each parser has to be reached."""
GROWN_BYTES: Final = 2048
"""The longest case that is kept for what it reaches."""
_PROGRESS_SECONDS: Final = 10.0


def main() -> int:
    """Run what the command line says; 1 where there is a finding, or a parser whose branches are not reached."""
    parser = Parser(__doc__)
    parser.add_argument("--target", action="append", help="a target's name, or all (the default); may be repeated")
    parser.add_argument("--cases", type=one_or_more, default=20_000, help="cases a target")
    parser.add_argument("--seed", type=zero_or_more, default=1)
    parser.add_argument("--start", type=zero_or_more, default=0, help="the number of the first case")
    parser.add_argument("--coverage", action="store_true", help="measure the branches that are reached")
    parser.add_argument(
        "--table", type=output_file, help="also write what is reached to this file: parser to (branches, reached)"
    )
    parser.add_argument("--grow", action="store_true", help="add cases that reach new code to the corpus")
    parser.add_argument("--replay", type=existing_file, help="run the case in this file against the one --target")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="where findings are written")
    options = parser.parse_args()
    coverage = _start_coverage() if options.coverage else None

    from fuzz_targets import HANDLERS, TARGETS  # noqa: PLC0415 - coverage has to begin before

    names = [name for name in options.target or ["all"] if name != "all"] or list(TARGETS)
    unknown = set(names) - set(TARGETS)
    if unknown:
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if options.replay is not None:
        return _replay(TARGETS[names[0]](), options.replay.read_bytes())
    failed = False
    targets = [TARGETS[name]() for name in names]
    for target in targets:
        if options.grow:
            _grow(target, seed=options.seed, start=options.start, cases=options.cases)
        else:
            failed |= _run(target, options)
    if coverage is not None:
        parsers = dict.fromkeys(module for target in targets for module in target.modules)
        failed |= _report_coverage(coverage, list(parsers), handlers=HANDLERS, table=options.table)
    return int(failed)


def _run(target: Target, options: argparse.Namespace) -> bool:
    from fuzz_engine import run_cases  # noqa: PLC0415 - coverage has to begin before
    from fuzz_targets import known_cases  # noqa: PLC0415 - the same

    told = time.monotonic()

    def tell(statistics: Statistics) -> None:
        nonlocal told
        if time.monotonic() - told >= _PROGRESS_SECONDS:
            told = time.monotonic()
            print(f"  {target.name}: {statistics.cases:,} cases, {statistics.seconds:.0f} s", flush=True)

    numbers = range(options.start, options.start + options.cases)
    known = [] if options.start else known_cases(target)
    statistics = run_cases(target, seed=options.seed, numbers=numbers, known=known, on_progress=tell)
    outcomes = ", ".join(f"{word} {count:,}" for word, count in statistics.outcomes.most_common(12))
    print(
        f"{target.name}: {statistics.cases:,} cases from {options.start} with seed {options.seed} in {statistics.seconds:.1f} s "
        f"({1e6 * statistics.seconds / max(1, statistics.cases):.0f} µs each), "
        f"slowest {1000 * statistics.slowest_seconds:.0f} ms (number {statistics.slowest_number}), "
        f"{len(statistics.findings)} findings\n  {outcomes}",
        flush=True,
    )
    told_causes: set[str] = set()
    for finding in statistics.findings:
        cause = finding.what.rstrip().rpartition("\n")[2]
        _tell_finding(finding, options, with_trace=cause not in told_causes)
        told_causes.add(cause)
    return bool(statistics.findings)


def _tell_finding(finding: Finding, options: argparse.Namespace, *, with_trace: bool) -> None:
    options.findings.mkdir(parents=True, exist_ok=True)
    path = options.findings / f"{finding.target}-{options.seed}-{finding.number}"
    path.write_bytes(finding.case)
    print(f"FINDING {finding.target} number {finding.number}, seed {options.seed}: {path}")
    print(f"  again: tools/fuzz_parsers.py --target {finding.target} --replay {path}")
    print(finding.what if with_trace else finding.what.rstrip().rpartition("\n")[2], flush=True)


def _replay(target: Target, case: bytes) -> int:
    print(f"{target.name}: {target.run(case)}")
    return 0


def _start_coverage() -> Any:  # noqa: ANN401 - a library of the tests
    import coverage  # noqa: PLC0415 - needed for this alone

    measured = coverage.Coverage(branch=True, data_file=None, include=[str(REPOSITORY / "kvobj" / "api" / "*")])
    measured.start()
    return measured


def _report_coverage(
    coverage: Any,  # noqa: ANN401 - as above
    parsers: Sequence[str],
    *,
    handlers: Collection[str],
    table: Path | None,
) -> bool:
    """Print how much of each parser's branches was reached; whether one is below the bar. `FILE:NAME` is a function.

    `handlers` are no parsers: they are shown, and need not be reached.
    """
    coverage.stop()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        coverage.json_report(outfile=report.name)
        files = {
            str(Path(name).resolve().relative_to(REPOSITORY)): found
            for name, found in json.load(report)["files"].items()
        }
    counts: dict[str, tuple[int, int]] = {}
    print(f"{'parser':56} branches  reached")
    for parser in parsers:
        name, _, function = parser.partition(":")
        found = files[name]["functions"][function] if function else files[name]
        branches, reached = counts[parser] = (found["summary"]["num_branches"], found["summary"]["covered_branches"])
        missing = found["missing_branches"] if reached < branches else ""
        print(f"{parser:56} {branches:8} {reached / max(1, branches):8.1%}  {missing}")
    if table is not None:
        table.write_text(json.dumps(counts))
    return any(reached < PART * branches for name, (branches, reached) in counts.items() if name not in handlers)


def _grow(target: Target, *, seed: int, start: int, cases: int) -> None:
    """Write those cases to the corpus that run lines in an order none before them did. Slow: every line is traced."""
    from fuzz_engine import make_case  # noqa: PLC0415 - coverage has to begin before
    from fuzz_targets import GROWN, known_cases  # noqa: PLC0415 - the same

    files = {str(REPOSITORY / module.partition(":")[0]) for module in target.modules}
    arcs: set[tuple[CodeType, int, int]] = set()
    last: dict[FrameType, int] = {}

    def trace_line(frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401 - a trace function returns itself
        if event == "line":
            arcs.add((frame.f_code, last.get(frame, 0), frame.f_lineno))
            last[frame] = frame.f_lineno
        elif event == "return":
            last.pop(frame, None)
        return trace_line

    def trace_call(frame: FrameType, _event: str, _argument: object) -> Any:  # noqa: ANN401 - as above
        return trace_line if frame.f_code.co_filename in files else None

    folder = GROWN / target.name
    folder.mkdir(parents=True, exist_ok=True)
    kept = 0
    for number in itertools.chain([-1], range(start, start + cases)):
        tried = known_cases(target) if number < 0 else [make_case(target, seed, number)]
        before = len(arcs)
        sys.settrace(trace_call)
        try:
            for case in tried:
                target.run(case)
        finally:
            sys.settrace(None)
            last.clear()
        if len(arcs) > before and number >= 0 and len(tried[0]) <= GROWN_BYTES:
            kept += 1
            (folder / f"{seed}-{number}").write_bytes(tried[0])
    print(f"{target.name}: {kept} cases kept, {len(arcs)} steps from line to line seen")


if __name__ == "__main__":
    run_tool(main)
