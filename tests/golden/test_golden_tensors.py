"""Tensor frames of every released codec revision stay the same, byte for byte. Golden vectors are added, never changed
(`tools/make_golden_tensors.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from make_golden_tensors import CODECS, Vector, path_of, vector
from tensor_cases import CASES

from kvobj.tensors.codec_names import CodecName
from kvobj.tensors.codecs import is_lossy, refusal
from kvobj.tensors.kernels import build

DIRECTORY = Path(__file__).parent / "tensor_frames"
GOLDEN: dict[str, dict[str, Vector]] = {path.name: json.loads(path.read_text()) for path in DIRECTORY.glob("*.json")}


@cache
def golden(codec: str) -> dict[str, Vector]:
    return GOLDEN[path_of(codec).name]


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_of_this_revision_has_its_vectors(codec: str) -> None:
    wanted = {name for name, case in CASES.items() if refusal(codec, case.form) is None}
    assert set(golden(codec)) == wanted
    assert is_lossy(codec) or {name for name, case in CASES.items() if case.form.element_bytes == 2} <= wanted


@pytest.mark.parametrize(
    ("codec", "name"), [(codec, name) for codec in CODECS for name in GOLDEN.get(path_of(codec).name, {})]
)
def test_a_golden_tensor_is_encoded_and_decoded_the_same_today(codec: str, name: str) -> None:
    assert vector(codec, name) == golden(codec)[name]


def test_every_golden_file_is_of_a_codec_that_exists() -> None:
    assert set(GOLDEN) == {path_of(codec).name for codec in CODECS}
    assert all(CodecName.parse(codec).kind.revision >= 1 for codec in CODECS)


@pytest.mark.parametrize("variant", sorted(build.variants()))
def test_all_variants_of_the_kernels_write_the_same_frames(variant: str) -> None:
    """A variant that this CPU does not run says so; CI's CPUs run v2 and v3 at least."""
    command = [sys.executable, str(Path(__file__).parents[2] / "tools" / "make_golden_tensors.py"), "--check"]
    done = subprocess.run(
        command, env={**os.environ, "KVOBJ_KERNELS": variant}, capture_output=True, text=True, timeout=120, check=False
    )
    if "no CPU kernels" in done.stderr and variant == "v4":
        assert "no variant for this CPU" in done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
