"""The kernels as one text without includes, for a compiler that has no files; and the machine code made of it, kept on disk."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

from kvobj.gpu.nvrtc import OPTIONS, Nvrtc
from kvobj.tensors.kernels.build import DIRECTORY, SOURCE

_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_KERNEL: Final = re.compile(r"\bKV_KERNEL\(\s*(\w+)\s*,")
# Of the host's half of the vocabulary nothing is needed here, and it is large.
_HOST_ONLY: Final = frozenset({"lanes_cpu.h"})


@cache
def kernel_source() -> str:
    """`kernels.cc` with every include in its place, once."""
    return _expanded(SOURCE, {SOURCE.name})


def kernel_names() -> tuple[str, ...]:
    """The names of all kernels (`kv_<name>` in the machine code), in the order of the source."""
    text = re.sub(r"^[ \t]*#[ \t]*define.*(?:\\\n.*)*$", "", kernel_source(), flags=re.MULTILINE)
    text = re.sub(r"//[^\n]*", "", text)
    return tuple(dict.fromkeys(_KERNEL.findall(text)))


@cache
def warp_bytes(kernel: str) -> int:
    """Bytes of fast memory that each warp of a kernel needs (`KV_WARP_MEMORY`)."""
    found = re.search(rf"^KV_WARP_MEMORY\({kernel}, (\d+)\)", kernel_source(), re.MULTILINE)
    return 0 if found is None else int(found[1])


def cubin_path(compiler: Nvrtc, arch: str, directory: Path | None = None, *, source: str | None = None) -> Path:
    """A file with the machine code for `arch` of the kernels, or of another `source`, compiled unless it is there from an earlier
    time. Blocks for seconds.

    `directory` is `KVOBJ_KERNEL_CACHE`, or `kvobj/kernels` in the user's cache. `CompileError`; OSError where nothing can be
    written.
    """
    source = kernel_source() if source is None else source
    digest = hashlib.blake2b(repr((source, OPTIONS, compiler.version, arch)).encode(), digest_size=16).hexdigest()
    folder = _cache_directory() if directory is None else directory
    path = folder / f"{digest}-{arch}.cubin"
    if not path.exists():
        made = compiler.compile(source, name="kernels.cu", arch=arch).cubin
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as scratch:
            scratch.write(made)
        Path(scratch.name).replace(path)
    return path


def _cache_directory() -> Path:
    chosen = os.environ.get("KVOBJ_KERNEL_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvobj" / "kernels"


def _expanded(path: Path, seen: set[str]) -> str:
    def include(found: re.Match[str]) -> str:
        name = found[1]
        if name in seen or name in _HOST_ONLY:
            return ""
        seen.add(name)
        return _expanded(DIRECTORY / name, seen)

    return _INCLUDE.sub(include, path.read_text())
