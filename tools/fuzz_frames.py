"""Feeds the readers of tensor frames damaged frames, by default with the CPU kernels built under AddressSanitizer.

A case is made of the seed, the codec and its number alone, so a finding is made again with --codec, --start and --cases. What must
hold: damaged bytes are refused by a typed error or decode to some values; nothing outside of exactly the given memory is read or
written; no case takes long; no process grows. How it works and its record: docs/fuzzing.md.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

from command_line import Parser, one_or_more, output_file, run_tool, zero_or_more

REPOSITORY: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [os.environ.get("KVOBJ_FUZZ_TREE", str(REPOSITORY)), str(REPOSITORY / "tools")]

from frame_fuzz.cases import Fuzz  # noqa: E402 - found by the path above
from frame_fuzz.corpus import CODECS  # noqa: E402
from frame_fuzz.exact_memory import INSIDE  # noqa: E402
from frame_fuzz.planted import DEFECTS, arm  # noqa: E402
from frame_fuzz.sanitized import sanitized  # noqa: E402

from kvobj.tensors.kernels import load  # noqa: E402

GROWTH_BYTES: Final = 512 * 1024 * 1024
CASE_SECONDS: Final = 60
"""A case that takes longer ends the process; sound ones take milliseconds."""
_TOLD_SECONDS: Final = 30.0
_NUMBER: Final = struct.Struct("<16sQ")


def main() -> int:
    """Run what the command line says; 1 where anything did not hold."""
    parser = Parser(__doc__)
    parser.add_argument("--codec", action="append", choices=CODECS, help="may be repeated; all by default")
    parser.add_argument("--cases", type=one_or_more, default=20_000, help="cases in all, shared by the codecs")
    parser.add_argument("--seed", type=zero_or_more, default=1)
    parser.add_argument("--start", type=zero_or_more, default=0, help="the number of the first case of each codec")
    parser.add_argument(
        "--samples", type=one_or_more, default=48, help="sound frames a codec, from which cases are made"
    )
    parser.add_argument(
        "--variant", choices=("base", "v2", "v3", "v4"), default="v3", help="which build of the kernels"
    )
    parser.add_argument("--plain", action="store_true", help="the installed kernels, up against guard pages")
    parser.add_argument(
        "--library", type=Path, default=REPOSITORY / "build" / "fuzz", help="where built kernels are kept"
    )
    parser.add_argument("--build-only", action="store_true", help="build what is to be run, and end")
    parser.add_argument("--plant", choices=DEFECTS, help="leave out a check of the kernels: 0 if that is found, else 1")
    parser.add_argument(
        "--tally", type=output_file, help="also write what came of the cases to this file: codec to outcome to count"
    )
    parser.add_argument("--last", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.plain and INSIDE not in os.environ:
        return _sanitized_run(options)
    print(load.status().detail, flush=True)
    codecs = options.codec or list(CODECS)
    if options.plant is not None:
        library = load.cpu_library()
        assert library is not None, "it was built just now"
        arm(library, options.plant)
        codecs = [DEFECTS[options.plant].codec]
    tally: dict[str, Counter[str]] = {codec: Counter() for codec in codecs}
    # Not a generator, which would end with the first that does not hold.
    held = [_run(codec, options, max(1, options.cases // len(codecs)), tally[codec]) for codec in codecs]
    if options.tally is not None:
        options.tally.write_text(json.dumps(tally, indent=1, sort_keys=True))
    return int(not all(held))


def _sanitized_run(options: argparse.Namespace) -> int:
    """Run this command again on sanitized kernels, and say how to make again what ended it."""
    if not load.runs_here(options.variant):
        print(f"{options.variant}: not for this CPU")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        build = sanitized(options.variant, tree=tree, kept=options.library, is_planted=options.plant is not None)
        if options.build_only:
            return 0
        last = Path(scratch) / "last"
        last.write_bytes(bytes(_NUMBER.size))
        command = [sys.executable, *sys.argv, "--last", str(last)]
        done = subprocess.run(command, env=build.environment(), check=False)
        codec, number = _NUMBER.unpack(last.read_bytes())
        if done.returncode < 0:
            print(f"ended by {signal.Signals(-done.returncode).name}")
            print(f"again: --variant {options.variant} --codec {codec.rstrip(bytes(1)).decode()} --seed {options.seed} "
                  f"--start {number} --cases 1")  # fmt: skip
        if options.plant is not None:
            print(f"{options.plant}: {'found' if done.returncode else 'NOT FOUND'} in case {number}")
            return int(done.returncode == 0)
        return int(done.returncode != 0)


def _run(codec: str, options: argparse.Namespace, cases: int, came: Counter[str]) -> bool:
    fuzz = Fuzz(codec, seed=options.seed, count=options.samples)
    slowest, last = 0.0, _Last(options.last)
    before, begun = _resident_bytes(), time.monotonic()
    told = begun
    for number in range(options.start, options.start + cases):
        last.write(codec, number)
        signal.alarm(CASE_SECONDS)
        start = time.thread_time()
        try:
            came[fuzz.case(number)] += 1
        except Exception as error:
            error.add_note(f"again: --codec {codec} --seed {options.seed} --start {number} --cases 1")
            raise
        slowest = max(slowest, time.thread_time() - start)
        if time.monotonic() - told > _TOLD_SECONDS:
            told = time.monotonic()
            print(f"  {codec}: {number - options.start + 1} of {cases}, {told - begun:.0f} s", flush=True)
    signal.alarm(0)
    grown = _resident_bytes() - before
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(came.items()))
    print(
        f"{codec}: {cases} cases, {time.monotonic() - begun:.0f} s, slowest {slowest * 1e3:.0f} ms; {outcomes}",
        flush=True,
    )
    if grown > GROWTH_BYTES:
        print(f"{codec}: the process grew by {grown >> 20} MiB")
    return grown <= GROWTH_BYTES


class _Last:
    """Which case is running, where it can be read after the process has ended."""

    def __init__(self, path: Path | None) -> None:
        self._memory: mmap.mmap | None = None
        if path is not None:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _NUMBER.size)

    def write(self, codec: str, number: int) -> None:
        if self._memory is not None:
            _NUMBER.pack_into(self._memory, 0, codec.encode(), number)


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    run_tool(main)
