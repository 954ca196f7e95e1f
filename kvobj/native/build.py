"""Compiles the C sources beside this file into one shared library. Standard library only: the build hook runs it before
anything is installed, `make native` again after a source changed.

Plain C without Python's headers, loaded through ctypes, so that one library serves every Python version.
Not `-march=native`: a wheel runs on other machines than built it. No contraction of a*b+c: the pure twins must decide the same,
and they round twice.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DIRECTORY = Path(__file__).parent
LIBRARY = DIRECTORY / "libkvobj.so"
FLAGS = (
    "-O3",
    "-std=c11",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror=implicit-function-declaration",
)
SECONDS = 120


class BuildError(Exception):
    """Why there is no library; kvobj runs without it, slower."""


def sources() -> list[Path]:
    """The C files, in a fixed order; every one becomes part of the library."""
    return sorted(DIRECTORY.glob("*.c"))


def fingerprint() -> str:
    """16 hex digits of all sources, headers and flags: what the library was made from, and what it should be made from."""
    digest = hashlib.blake2b(" ".join(FLAGS).encode(), digest_size=8)
    for path in sorted([*DIRECTORY.glob("*.c"), *DIRECTORY.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build() -> list[Path]:
    """Compile and put the library in place in one rename: a process that has the old one mapped keeps it. `BuildError`."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BuildError("no C compiler (cc, gcc, clang or CC); on Debian: apt-get install gcc libc6-dev")
    try:
        return [_build(compiler)]
    except OSError as error:  # of an installation that is not ours to write to, among others
        raise BuildError(f"{DIRECTORY}: {error}") from error


def _build(compiler: str) -> Path:
    with tempfile.TemporaryDirectory(prefix=".build-", dir=DIRECTORY) as scratch:
        made = Path(scratch) / LIBRARY.name
        define = f'-DKVOBJ_NATIVE_FINGERPRINT="{fingerprint()}"'
        command = [*compiler.split(), *FLAGS, define, "-o", str(made), *map(str, sources()), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603 - the command is made above
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler}: {error}") from error
        if done.returncode:
            raise BuildError(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
        if done.stderr.strip():
            sys.stderr.write(done.stderr)
        made.replace(LIBRARY)
    return LIBRARY


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.stderr.write(f"kvobj's native library was not built, its pure Python twins are used instead: {error}\n")
