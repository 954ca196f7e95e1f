"""Every kernel compiles for the GPUs that are named, by NVRTC alone: no GPU and no driver are needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvobj.gpu import kernel_source, nvrtc

MACHINE_CODE = b"\x7fELF"
OPTIMISED = {"sm_80", "sm_90"}  # the quick way has no products of pairs (dp2a) for sm_80
QUICK = "--Ofast-compile=max"  # the same source checked as strictly, for machine code that nobody runs


@pytest.fixture(scope="module")
def compiler() -> nvrtc.Nvrtc:
    return nvrtc.find_nvrtc()


@pytest.fixture(scope="module")
def machine_code(compiler: nvrtc.Nvrtc) -> dict[str, nvrtc.Compiled]:
    """Of all architectures, made beside each other: those `OPTIMISED` as GPUs run it, 25 s of CPU each, the others in 3 s."""
    source = kernel_source.kernel_source()

    def compiled(arch: str) -> nvrtc.Compiled:
        options = nvrtc.OPTIONS if arch in OPTIMISED else (*nvrtc.OPTIONS, QUICK)
        return compiler.compile(source, name="kernels.cu", arch=arch, options=options)

    with ThreadPoolExecutor(len(nvrtc.ARCHITECTURES)) as pool:
        return dict(zip(nvrtc.ARCHITECTURES, pool.map(compiled, nvrtc.ARCHITECTURES), strict=True))


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_every_kernel_is_in_the_machine_code(machine_code: dict[str, nvrtc.Compiled], arch: str) -> None:
    compiled, names = machine_code[arch], kernel_source.kernel_names()
    assert names
    assert compiled.cubin.startswith(MACHINE_CODE)
    assert [name for name in names if f"kv_{name}\0".encode() not in compiled.cubin] == []
    assert compiled.log == ""


def test_the_source_is_whole_and_names_no_file() -> None:
    source = kernel_source.kernel_source()
    assert "#include" not in source
    assert "__global__" in source
    assert "immintrin" not in source, "the CPU's half of the vocabulary is not the GPU's business"


def test_a_fault_in_the_source_is_told_with_its_line(compiler: nvrtc.Nvrtc) -> None:
    with pytest.raises(nvrtc.CompileError, match=r"broken\.cu\(2\)") as raised:
        compiler.compile("\nint f() { return x; }", name="broken.cu", arch="sm_90")
    assert "identifier" in raised.value.log


def test_the_architectures_are_among_those_that_the_compiler_knows(compiler: nvrtc.Nvrtc) -> None:
    assert set(nvrtc.ARCHITECTURES) <= set(compiler.architectures())


def test_machine_code_is_compiled_once_and_kept_by_its_source(compiler: nvrtc.Nvrtc, tmp_path: Path) -> None:
    source = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2.0f; }'
    path = kernel_source.cubin_path(compiler, "sm_90", tmp_path, source=source)
    assert path.read_bytes().startswith(MACHINE_CODE)
    path.write_bytes(b"kept")
    assert kernel_source.cubin_path(compiler, "sm_90", tmp_path, source=source).read_bytes() == b"kept"
    others = [
        kernel_source.cubin_path(compiler, "sm_80", tmp_path, source=source),
        kernel_source.cubin_path(compiler, "sm_90", tmp_path, source=source + "\n"),
    ]
    assert len({path, *others}) == 3
    assert not [other for other in tmp_path.iterdir() if other.suffix != ".cubin"]
