"""A GPU's warps on the CPU: the GPU's half of the kernels, compiled by g++, its threads run one at a time in an order that a seed
gives (`kernels_gpu/emulated_warp.cc`). Slow, and it says what a GPU would not forgive.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from kernel_blocks import Fenced

from kvobj.gpu import kernel_source
from kvobj.gpu.device import Stream
from kvobj.gpu.host_device import HostDevice, HostStream
from kvobj.tensors.kernels import build
from kvobj.tensors.kernels.host_launcher import HostLauncher
from kvobj.tensors.kernels.launcher import Address, Launcher

SOURCES: Final = Path(__file__).parent / "kernels_gpu"
ASCENDING: Final = 0
DESCENDING: Final = 1
_FLAGS: Final = (
    "-O1", "-g1", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fwrapv", "-fno-math-errno",
    "-fno-exceptions", "-U_FORTIFY_SOURCE", "-Wall", "-Wno-unused-function", "-Wno-unknown-pragmas",
)  # fmt: skip
_SEEN: Final = ("-fsanitize=thread,shift-exponent", "--param", "tsan-instrument-func-entry-exit=0", "-fno-rtti")
"""What has every access to memory and every shift call what `emulated_warp.cc` defines; no library of the compiler's is linked."""
_SECONDS: Final = 120
_FILL: Final = 0xC9


class EmulatedLauncher(HostLauncher):
    """See `Launcher`: launches fail with what the emulation found. Not of the host, so that codecs do as on a GPU. One thread's at
    a time."""

    __slots__ = ("_emulation", "_given", "_scratch")

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._emulation = library
        self._scratch: dict[str, tuple[int, int]] = {}
        self._given: list[tuple[int, int]] | None = None
        library.emulated_problem.restype = ctypes.c_char_p

    @property
    def is_host(self) -> bool:
        """See `Launcher.is_host`."""
        return False

    def order(self, seed: int) -> None:
        """Have threads run in this order from here on: one after the other (0), from the last (1), or at random."""
        self._emulation.emulated_order(seed)

    def given(self, *parts: Fenced) -> None:
        """What kernels may touch from here on, besides scratch; nothing: everything."""
        self._given = [(part.address, len(part.view)) for part in parts] or None

    def launch(self, kernel: str, warps: int, *arguments: Address | float) -> None:
        """See `Launcher.launch`."""
        _check_types(kernel, arguments)
        parts = [] if self._given is None else [*self._given, *self._scratch.values()]
        flat = (ctypes.c_uint64 * (2 * len(parts)))(*(number for part in parts for number in part))
        self._emulation.emulated_given(flat, len(parts))
        super().launch(kernel, warps, *arguments)
        problem = self._emulation.emulated_problem().decode()
        assert not problem, problem

    def scratch(self, slot: str, size_bytes: int) -> Address:
        """See `Launcher.scratch`: never what it held before."""
        at = super().scratch(slot, size_bytes)
        ctypes.memset(int(at), _FILL, size_bytes)
        self._scratch[slot] = (at, size_bytes)
        return at


class EmulatedDevice(HostDevice):
    """See `Device`: host memory, and the GPU's kernels."""

    def __init__(self, total_bytes: int, launcher: EmulatedLauncher) -> None:
        super().__init__(total_bytes)
        self._emulated = launcher

    def launcher(self, stream: Stream) -> Launcher:
        """See `Device.launcher`."""
        assert isinstance(stream, HostStream)
        return _InTurn(self._emulated, stream)


class _InTurn:
    """See `Launcher`: behind what a stream still has to do."""

    def __init__(self, inner: EmulatedLauncher, stream: HostStream) -> None:
        self._inner = inner
        self._stream = stream
        self.name = "emulated"
        self.is_host = False

    def __hash__(self) -> int:
        return hash(self._inner)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _InTurn) and other._inner is self._inner  # its tables are prepared once

    def launch(self, kernel: str, warps: int, *arguments: Address | float) -> None:
        self._stream.wait()
        self._inner.launch(kernel, warps, *arguments)

    def scratch(self, slot: str, size_bytes: int) -> Address:
        return self._inner.scratch(slot, size_bytes)

    def upload(self, to: Address, data: bytes | memoryview) -> None:
        self._stream.wait()
        self._inner.upload(to, data)

    def download(self, at: Address, into: memoryview) -> None:
        self._stream.wait()
        self._inner.download(at, into)


def emulated_library(
    folder: Path, *, kernels: Path = build.DIRECTORY, source: str = "emulated_kernels.cc"
) -> ctypes.CDLL:
    """Compile the kernels in the directory `kernels` for emulated warps, or another `source`. Skips where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [
        _compiled(compiler, source, folder, [*_SEEN, f"-I{SOURCES}", f"-I{kernels}"]),
        _compiled(compiler, "emulated_warp.cc", folder, ["-O2"]),
    ]
    library = folder / "libemulated.so"
    _run([compiler, "-shared", "-o", str(library), *parts])
    return ctypes.CDLL(str(library))


@cache
def _parameters() -> dict[str, list[str]]:
    """Of each kernel the types of its parameters, as the source declares them."""
    found = re.findall(r"KV_KERNEL\(\s*(\w+)\s*,\s*\(([^()]*)\)", kernel_source.kernel_source())
    return {name: [" ".join(each.split()[:-1]) for each in declared.split(",")] for name, declared in found}


def parameters_of(kernel: str) -> list[str]:
    """The types of its parameters, after the number of warps; KeyError where there is no such kernel."""
    return _parameters()[kernel]


def _check_types(kernel: str, arguments: Sequence[Address | float]) -> None:
    """A GPU reads as many bytes of each argument as the kernel declares, so the launcher has to give as many."""
    declared = _parameters().get(kernel)
    if declared is None:
        return
    assert len(arguments) == len(declared), kernel
    for at, (value, wanted) in enumerate(zip(arguments, declared, strict=True)):
        given = {Address: "*", float: "float"}.get(type(value), "u32")
        assert given == ("*" if wanted.endswith("*") else wanted), (kernel, at, wanted)
        if given == "u32":
            assert 0 <= value < 1 << 32, (kernel, at, value)


def _compiled(compiler: str, source: str, folder: Path, options: Sequence[str]) -> str:
    made = folder / f"{source}.o"
    _run([compiler, *_FLAGS, *options, "-c", str(SOURCES / source), "-o", str(made)])
    return str(made)


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
