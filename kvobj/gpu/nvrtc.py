"""NVIDIA's runtime compiler, driven by ctypes: kernel source in, machine code for a GPU out. It needs no GPU and no CuPy.

The library is that of the wheel `nvidia-cuda-nvrtc` (which torch brings along), of `CUDA_PATH`, or the system's. Calls block for as
long as a compilation takes (seconds) and let go of the GIL.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from kvobj.errors import KvobjError, UnavailableError

OPTIONS: Final = ("-fmad=false", "--std=c++17", "-diag-suppress=177")
"""No contraction of a*b+c: the CPU must get the same bits. Never fast-math. 177: of the vocabulary no kernel set needs all."""
ARCHITECTURES: Final = ("sm_80", "sm_90", "sm_100")
"""What is compiled in CI: A100; H100 and H200; B200."""
_NAMES: Final = ("libnvrtc.so.13", "libnvrtc.so.12")


class CompileError(KvobjError):
    """The compiler refuses the source; `log` is what it says."""

    def __init__(self, name: str, arch: str, log: str) -> None:
        super().__init__("kernels do not compile", name=name, arch=arch)
        self.log = log

    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.log}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin, and the warnings that there were."""

    cubin: bytes
    log: str


class Nvrtc:
    """One library. Thread-safe."""

    def __init__(self, path: Path | str) -> None:
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def architectures(self) -> tuple[str, ...]:
        """What it compiles for: `sm_80` and so on."""
        number = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(number))
        found = (ctypes.c_int * number.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return tuple(f"sm_{each}" for each in found)

    def compile(self, source: str, *, name: str, arch: str, options: Sequence[str] = OPTIONS) -> Compiled:
        """Compile one translation unit without includes. `CompileError` with the compiler's words."""
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), ctypes.c_int(0), None, None
        )
        try:
            given = [option.encode() for option in (f"-arch={arch}", *options)]
            code = self._library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
            log = self._text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program).decode(errors="replace")
            if code:
                raise CompileError(name, arch, log.strip("\0\n"))
            return Compiled(self._text("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program), log.strip("\0\n"))
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, ask_size: str, ask: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(ask_size, program, ctypes.byref(size))
        into = ctypes.create_string_buffer(size.value)
        self._call(ask, program, into)
        return into.raw

    def _call(self, function: str, *arguments: object) -> None:
        code = self._library[function](*arguments)
        if code:
            raise UnavailableError("NVRTC failed", function=function, code=code)


@cache
def find_nvrtc(major_max: int = 99) -> Nvrtc:
    """The newest library that is here, of at most that major version (a driver loads no code of a later CUDA than its own).

    `UnavailableError` where there is none.
    """
    for name in _NAMES:
        if int(name.rpartition(".")[2]) > major_max:
            continue
        for candidate in (*_directories(name), name):
            try:
                return Nvrtc(candidate)
            except OSError:
                continue
    raise UnavailableError("no NVRTC here (pip install nvidia-cuda-nvrtc)", major_max=major_max)


def _directories(name: str) -> list[Path]:
    found: list[Path] = []
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec is not None else []:
        found += sorted(Path(root).glob(f"*/lib/{name}"))
    cuda = os.environ.get("CUDA_PATH") or os.environ.get("CUDA_HOME")
    if cuda:
        found += [Path(cuda) / "lib64" / name]
    return [path for path in found if path.exists()]
