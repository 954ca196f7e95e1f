"""`kvobj.gpu` where there is no GPU: it imports, and says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvobj.errors import DeviceError
from kvobj.gpu import open_device, status
from kvobj.gpu.cuda_device import CudaDevice, unavailable

WITHOUT = """
import sys
sys.modules["cupy"] = sys.modules["torch"] = None
from kvobj import gpu
import kvobj.gpu.codec_copies, kvobj.gpu.ipc, kvobj.gpu.tensors, kvobj.gpu.torch_slabs, kvobj.tiers.hbm
found = gpu.status()
assert not found.is_usable
print(found.detail)
"""


def test_it_imports_and_answers_without_torch_and_cupy() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CuPy is not installed or does not load")


def test_asking_what_is_missing_does_not_load_torch() -> None:
    script = "import sys; from kvobj import gpu; gpu.status(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "False\n", done.stderr


def test_a_gpu_that_is_not_there_is_refused_with_the_reason() -> None:
    reason = unavailable(1023)
    assert reason
    with pytest.raises(DeviceError) as raised:
        CudaDevice(1023)
    assert raised.value.message == reason
    with pytest.raises(DeviceError):
        open_device(1023)


def test_the_status_says_which_compiler_is_here() -> None:
    assert status().compiler.startswith("NVRTC ")
