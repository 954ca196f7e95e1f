"""The CPU kernels under AddressSanitizer, and the environment that a process needs to run them.

Built from a private copy of kvobj, which the process imports too, so that edits meanwhile change nothing. Libraries are kept by
what they were made of: a build takes two minutes of one core.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from frame_fuzz.exact_memory import INSIDE
from frame_fuzz.planted import plant

_PACKAGE: Final = Path(__file__).resolve().parent.parent.parent / "kvobj"
_CHECKS: Final = Path(__file__).with_name("checked_intrinsics.h")
_FLAGS: Final = ("-O1", "-g1", "-fsanitize=address")
_SECONDS: Final = 900
_OPTIONS: Final = (
    "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:quarantine_size_mb=16:max_redzone=256:"
    "malloc_context_size=1:handle_segv=1:detect_stack_use_after_return=0"
)


@dataclass(frozen=True, slots=True)
class Sanitized:
    """A library, and the copy of kvobj that it belongs to."""

    library: Path
    tree: Path

    def environment(self) -> dict[str, str]:
        """For a process that is to use it."""
        runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        return {
            **os.environ,
            INSIDE: str(self.tree),
            "LD_PRELOAD": runtime.stdout.strip(),
            "ASAN_OPTIONS": _OPTIONS,
            "KVOBJ_KERNELS": str(self.library),
        }


def sanitized(variant: str, *, tree: Path, kept: Path, is_planted: bool = False) -> Sanitized:
    """Copy kvobj to `tree`, an empty folder, plant defects in the copy where that is asked for, and build what it needs into `kept`
    unless it is there already."""
    copy = tree / "kvobj"
    shutil.copytree(_PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__", ".build-*"))
    kernels = copy / "tensors" / "kernels"
    if is_planted:
        plant(kernels)
    build = _module(kernels / "build.py")
    fingerprint = build.fingerprint()
    how = hashlib.blake2b(repr(_FLAGS).encode() + _CHECKS.read_bytes(), digest_size=4).hexdigest()
    library = kept / f"libkvkernels-{variant}-{fingerprint}-{how}.so"
    if not library.exists():
        kept.mkdir(parents=True, exist_ok=True)
        usual = [flag for flag in build.FLAGS if flag != "-O3"]
        define = f'-DKVOBJ_KERNELS_FINGERPRINT="{fingerprint}"'
        made = tree / library.name
        command = ["g++", *usual, *_FLAGS, *build.variants()[variant], "-include", _CHECKS, define, "-o", made]
        subprocess.run([*command, build.SOURCE], check=True, timeout=_SECONDS)
        shutil.move(made, library)
    return Sanitized(library, tree)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzzed_kernels_build", path)
    assert spec is not None, "a path to a module"
    assert spec.loader is not None, "a path to a module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
