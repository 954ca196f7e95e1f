"""The tool that measures a GPU, over host memory in its place: everything but the speeds is the same."""

from __future__ import annotations

import bench_gpu
import pytest
from tensor_cases import CASES

from kvobj.gpu import HostDevice
from kvobj.tensors.codecs import refusal
from kvobj.tensors.frame import parse_tensor_frame

MIB = 1 << 20


@pytest.fixture(scope="module")
def figures() -> dict[str, object]:
    return bench_gpu.run(HostDevice(256 * MIB), quick=True)


def test_every_codec_is_compared_with_the_cpu_and_measured(figures: dict[str, dict[str, object]]) -> None:
    assert bench_gpu.usable()
    assert figures["parity"]["differ"] == []
    cases = list(CASES.values())[: bench_gpu.QUICK_CASES]
    taken = [1 for codec in bench_gpu.usable() for case in cases if refusal(codec, case.form) is None]
    assert int(str(figures["parity"]["cases"])) == len(taken) > bench_gpu.QUICK_CASES
    (speeds,) = figures["gigabytes_per_second"].values()
    assert isinstance(speeds, dict)
    assert list(speeds) == bench_gpu.usable()
    for found in speeds.values():
        numbers = {name: value for name, value in found.items() if not name.endswith("_microseconds")}
        assert set(numbers) == {"ratio"} | {
            f"{way}_{of}" for way in ("encode", "decode") for of in ("kernels", "calls", "whole")
        }
        assert all(value > 0 for value in numbers.values())


def test_copies_and_tensors_are_measured(figures: dict[str, dict[str, object]]) -> None:
    assert figures["hand_over"]["is_the_same_memory"] is True
    assert {name.rpartition("_")[0] for name in figures["copies"]} == {"to_device", "to_host"}


def head_of_flipped(frame: memoryview, size: int) -> object:
    """The head of a frame with a flipped bit in its fingerprint, which its checksum would refuse."""
    right = memoryview(bytearray(frame))
    right[40] ^= 1
    return parse_tensor_frame(right, size)


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that cannot fail would prove nothing."""
    true = bench_gpu.on_cpu

    def false(plain: bytes, form: object, codec: str) -> memoryview:
        frame = true(plain, form, codec)  # type: ignore[arg-type]
        frame[40] ^= 1
        return frame

    world = bench_gpu.World(HostDevice(256 * MIB), 32 * MIB)
    monkeypatch.setattr(bench_gpu, "CODECS", bench_gpu.usable()[:1])
    monkeypatch.setattr(bench_gpu, "CASES", {"kv": CASES["kv"]})
    monkeypatch.setattr(bench_gpu, "parse_tensor_frame", head_of_flipped)
    monkeypatch.setattr(bench_gpu, "on_cpu", false)
    try:
        assert bench_gpu.parity(world)["differ"]
    finally:
        world.close()
