"""Compiles the kernels for this machine's CPUs: one library for each instruction set, of the one source. Standard library only: the
build hook runs it before anything is installed, `make native` again after a source changed.

Loaded through ctypes, so that one set of libraries serves every Python version. The loader takes the best that the CPU has.
No contraction of a*b+c, and integers wrap: the GPU must give the same bits (`lanes.h`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DIRECTORY = Path(__file__).parent
SOURCE = DIRECTORY / "kernels.cc"
FLAGS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-math-errno",  # a square root is one instruction
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vectors are passed between functions that are inlined
    "-Wno-unused-function",
    "-Wno-ignored-attributes",
    "-Wno-uninitialized",  # what GCC 12 says of its own AVX-512 headers, this and the next
    "-Wno-maybe-uninitialized",
    "-Wl,--as-needed",  # nothing of the C++ library is used, so none is asked for
)
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "v4": ("-march=x86-64-v4", "-mavx512vbmi", "-mavx512vbmi2"),  # Ice Lake, Zen 4 and later
        "v3": ("-march=x86-64-v3",),  # AVX2
        "v2": ("-march=x86-64-v2",),
    },
    "aarch64": {"base": ("-march=armv8-a+crc",)},
}
"""Machine → variant → flags, best first."""
SECONDS = 300
"""For all variants together: an installation that waits for a compiler ends."""


class BuildError(Exception):
    """Why there is no library; kvobj runs without it, with `raw` and `zp` alone."""


def variants() -> dict[str, tuple[str, ...]]:
    """The variants of this machine, best first."""
    return VARIANTS.get(platform.machine(), {"base": ()})


def library(variant: str) -> Path:
    """Where the variant's library is, or would be."""
    return DIRECTORY / f"libkvkernels-{variant}.so"


def sources() -> list[Path]:
    """Everything that the libraries are made from, in a fixed order; empty in an installation that came without."""
    return sorted(path for path in DIRECTORY.iterdir() if path.suffix in {".cc", ".h", ".cuh"})


def fingerprint() -> str:
    """16 hex digits of all sources and flags: what a library was made from, and what it should be made from."""
    digest = hashlib.blake2b(repr((FLAGS, VARIANTS)).encode(), digest_size=8)
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build() -> list[Path]:
    """Compile all variants that are not there yet as they should be, and put each in place in one rename: a process that has an
    old one mapped keeps it. Those that are there then, best first; why others are not is told on stderr. `BuildError` where none
    is."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    until = time.monotonic() + SECONDS

    def made(variant: str, flags: tuple[str, ...]) -> Path | BuildError:
        try:
            return _build(compiler, variant, flags, until)
        except BuildError as error:
            return error
        except OSError as error:  # of an installation that is not ours to write to, among others
            return BuildError(f"{DIRECTORY}: {error}")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        told = dict(zip(variants(), pool.map(made, variants(), variants().values()), strict=True))
    failed = {variant: error for variant, error in told.items() if isinstance(error, BuildError)}
    if len(failed) == len(told):
        raise next(iter(failed.values()))
    for variant, error in failed.items():
        sys.stderr.write(f"left out: variant {variant}: {error}\n")
    return [each for each in told.values() if isinstance(each, Path)]


def _is_built(variant: str) -> bool:
    """Whether the library is there and was made from these sources: an installation and `make native` both end up here."""
    try:
        return fingerprint().encode() in library(variant).read_bytes()
    except OSError:
        return False


def _build(compiler: str | None, variant: str, flags: tuple[str, ...], until: float) -> Path:
    if _is_built(variant):
        return library(variant)
    if compiler is None:
        raise BuildError("no C++ compiler (c++, g++, clang++ or CXX); on Debian: apt-get install g++")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=DIRECTORY) as scratch:
        made = Path(scratch) / library(variant).name
        define = f'-DKVOBJ_KERNELS_FINGERPRINT="{fingerprint()}"'
        command = [*compiler.split(), *FLAGS, *flags, define, "-o", str(made), str(SOURCE)]
        try:
            left = max(0.0, until - time.monotonic())
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)  # noqa: S603 - the command is made above
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"{compiler}: {error}") from error
        if done.returncode:
            raise BuildError(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
        if done.stderr.strip():
            sys.stderr.write(done.stderr)
        made.replace(library(variant))
    return library(variant)


if __name__ == "__main__":
    try:
        build()
    except BuildError as error:
        sys.stderr.write(f"kvobj's kernels were not built, tensor codecs cannot be used: {error}\n")
