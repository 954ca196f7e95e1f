"""Damaged tensor frames at the installed kernels, each buffer up against a page that nobody may touch. The long run is
`tools/fuzz_frames.py` under AddressSanitizer, its record docs/fuzzing.md."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from frame_fuzz.cases import Fuzz
from frame_fuzz.corpus import CODECS
from frame_fuzz.planted import DEFECTS, plant
from server_process import REPOSITORY

from kvobj.codec.checksums import crc32c
from kvobj.errors import FrameCorruptError
from kvobj.tensors.certificate import Certificate
from kvobj.tensors.codec_names import BY_NAME
from kvobj.tensors.codecs import parse_tensor_frame, unavailable
from kvobj.tensors.form import TensorForm
from kvobj.tensors.frame import HEADER_BYTES, Block, BlockPlaces, TensorFrame, write_tensor_head
from kvobj.tensors.kernels.build import DIRECTORY, sources

CASES = 1000
"""A codec. Some of what is asked for below is rare: a damaged frame of rANS streams seldom decodes."""
BOTH_ENDS = ("block decoded", "block refused", "frame decoded", "frame refused", "head refused", "bytes refused")

needs_kernels = pytest.mark.skipif(unavailable("x3") is not None, reason=f"{unavailable('x3')}")


@needs_kernels
def test_no_damaged_frame_makes_a_reader_touch_what_is_not_its_own(tmp_path: Path) -> None:
    tally = tmp_path / "tally.json"
    command = [sys.executable, "tools/fuzz_frames.py", "--plain", "--cases", str(CASES * len(CODECS))]
    done = subprocess.run(
        [*command, "--samples", "12", "--seed", "20260102", "--tally", str(tally)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    came = {codec: Counter(found) for codec, found in json.loads(tally.read_text()).items()}
    assert list(came) == sorted(CODECS)
    assert {codec: came[codec].total() for codec in CODECS} == dict.fromkeys(CODECS, CASES)
    missing = [(codec, what) for codec in CODECS for what in (*BOTH_ENDS, "encode done") if not came[codec][what]]
    assert missing == []


@needs_kernels
def test_a_case_is_its_number() -> None:
    first, again = Fuzz("eq4", seed=3, count=4), Fuzz("eq4", seed=3, count=4)
    outcomes = [first.case(number) for number in range(40)]
    assert [again.case(number) for number in reversed(range(40))] == outcomes[::-1]
    assert len(set(outcomes)) > 3


@needs_kernels
@pytest.mark.parametrize("past", [0, 1])
def test_a_buffer_ends_where_nobody_may_read(past: int) -> None:
    read = f"""
from frame_fuzz.exact_memory import ExactMemory
import ctypes
memory = ExactMemory.of(b"sixteen bytes ok")
print(ctypes.string_at(memory.address + 15 + {past}, 1))
"""
    done = subprocess.run(
        [sys.executable, "-c", read],
        cwd=REPOSITORY, env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tools'}"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == ((0, "b'k'\n"), (-signal.SIGSEGV, ""))[past]


def test_the_checks_that_the_long_run_leaves_out_are_there(tmp_path: Path) -> None:
    for path in sources():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    plant(tmp_path)
    changed = {path.name for path in sources() if (tmp_path / path.name).read_bytes() != path.read_bytes()}
    assert changed == {defect.source for defect in DEFECTS.values()} | {"kernels.cc"}
    assert {path.parent for path in sources()} == {DIRECTORY}


def head_of(form: TensorForm, codec: str, length: int, profile: bytes | None = None) -> TensorFrame:
    """A head of blocks of this many bytes each."""
    places = BlockPlaces(form)
    blocks = tuple(
        Block(places.add(length), length, crc32c(memoryview(bytes(length))), is_raw=False) for _ in range(form.blocks)
    )
    flags = BY_NAME[codec.split(":", maxsplit=1)[0]].flags | 1
    return TensorFrame(
        codec, form, bytes(32), Certificate(), blocks, places.end, bytes(16), flags=flags, profile_digest=profile
    )


@pytest.mark.parametrize("codec", ["x3", "xa", "f8", "eq:83/1", "h4", "ek:300/0"])
def test_the_head_of_a_frame_that_claims_128_mebibytes_is_read_in_little_memory(codec: str) -> None:
    form = TensorForm("k", "bf16", 1, 8, 128, 65_536)
    head = head_of(form, codec, 64, b"p" * 32 if codec.startswith("ek") else None)
    frame = memoryview(bytearray(head.frame_bytes))
    write_tensor_head(frame, head)
    tracemalloc.start()
    try:
        assert parse_tensor_frame(frame, len(frame)).form.plain_bytes == 128 * 1024 * 1024
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024


# Found by the fuzz.


@pytest.mark.parametrize("rung", [1, 15])
def test_a_frame_of_a_rung_that_its_codec_does_not_have_is_refused_when_its_head_is_read(rung: int) -> None:
    form = TensorForm("k", "bf16", 1, 2, 64, 16)
    head = head_of(form, "ek:300/0", 64, b"p" * 32)
    frame = memoryview(bytearray(head.frame_bytes))
    write_tensor_head(frame, head)
    with pytest.raises(FrameCorruptError, match="not canonical"):
        parse_tensor_frame(*resealed(frame, 300 | rung << 12))
    assert parse_tensor_frame(*resealed(frame, 300)).codec == "ek:300/0"


def resealed(frame: memoryview, step_index: int) -> tuple[memoryview, int]:
    """The frame with a step index and the header's checksum that belongs to it."""
    struct.pack_into("<H", frame, 18, step_index)
    struct.pack_into("<I", frame, HEADER_BYTES - 4, crc32c(frame[: HEADER_BYTES - 4]))
    return frame, len(frame)
