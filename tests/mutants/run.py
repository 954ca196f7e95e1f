"""Plants one mutant after another in a copy of the tree and lets the lease machine find it: `make mutants`.

A mutant is a patch beside this file, with its description in front: one rule of `gc-protocol` §4 or `tests/model` left out of the
real code. All must be found by `tests/stateful/test_lease_machine.py` as it is; nothing there is written for one of them.
Prints a table; ends with 1 if a mutant lives. `--only NAME`, `--seconds N` for each (600: the goal of F12), `--seed N` (may be
given again: a run with each) where it matters how long the machine takes in other orders.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MACHINE = "tests/stateful/test_lease_machine.py"
KEPT = ("kvobj", "tests", "tools", "pyproject.toml")
RUNS = 100_000


class Verdict(NamedTuple):
    """What became of one mutant: the assertion that found it last, and after how many seconds each run did; None: one did not."""

    name: str
    description: str
    found_by: str | None
    seconds: tuple[float, ...]


def judge(patch: Path, limit_seconds: float, seeds: Sequence[int | None]) -> Verdict:
    """Run the machine on a mutated copy of the tree, once with each seed (None: any)."""
    description = patch.read_text().partition("\n")[0]
    with tempfile.TemporaryDirectory(prefix="kvobj-mutant-") as directory:
        copy = Path(directory)
        for name in KEPT:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
            else:
                shutil.copy(source, copy / name)
        command = ["patch", "-p1", "--quiet", "--force", "-d", directory, "-i", str(patch)]
        if subprocess.run(command, timeout=30, check=False).returncode:
            return Verdict(patch.stem, f"{description} (the patch does not fit any more)", None, ())
        found_by: str | None = None
        seconds: list[float] = []
        for seed in seeds:
            began = time.monotonic()
            found_by = _run(copy, limit_seconds, seed)
            seconds.append(time.monotonic() - began)
            if found_by is None:
                break
            shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # what one run found is not told to the next
        return Verdict(patch.stem, description, found_by, tuple(seconds))


def _run(copy: Path, limit_seconds: float, seed: int | None) -> str | None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "KVOBJ_MACHINE": str(RUNS),
        "KVOBJ_MACHINE_SHRINK": "no",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", MACHINE]
    if seed is not None:
        command.append(f"--hypothesis-seed={seed}")
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    if process.returncode == 0:
        return None
    if process.returncode != 1:
        raise RuntimeError(f"the machine could not run:\n{output[-2000:]}")
    errors = [line[1:].strip() for line in output.splitlines() if re.match(r"E\s+[\w.]*(Error|assert)", line)]
    return _shortened(errors[0]) if errors else output[-200:]


def _shortened(error: str) -> str:
    """What an assertion said, without its values."""
    text = re.sub(r"\\x[0-9a-f]{2}|[0-9a-f]{12,}", "…", error)
    return re.split(r"[\[(]", text)[0].strip()[:70]


def main() -> None:
    """Judge all mutants, two at a time, and print what came of it."""
    parser = argparse.ArgumentParser(description="Plant mutants; the lease machine must find them")
    parser.add_argument("--only", action="append", help="just this one (may be given again)")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long one may live")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--seed", type=int, action="append", help="a run with this seed (may be given again)")
    options = parser.parse_args()
    seeds: list[int | None] = options.seed or [None]
    patches = sorted(path for path in HERE.glob("*.patch") if not options.only or path.stem in options.only)
    living = 0
    sys.stdout.write("| mutant | left out | found by | seconds |\n| --- | --- | --- | --- |\n")
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(lambda patch: judge(patch, options.seconds, seeds), patches):
            living += verdict.found_by is None
            found_by = verdict.found_by or "**nobody**"
            seconds = ", ".join(f"{each:.0f}" for each in verdict.seconds)
            sys.stdout.write(f"| {verdict.name} | {verdict.description} | {found_by} | {seconds} |\n")
            sys.stdout.flush()
    sys.exit(1 if living else 0)


if __name__ == "__main__":
    main()
