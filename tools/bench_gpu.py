"""What a GPU makes of the codecs: the same bytes as the CPU, case for case, and how fast; copies; tensors without copies.

    python tools/bench_gpu.py --json docs/figures/gpu.json      # on a machine with a GPU: CuPy and NVRTC installed
    python tools/bench_gpu.py --device host --quick             # the same over host memory: checks the tool, measures nothing

Exits 1 where a frame or a decoded byte differs from the CPU's. Speeds are of plain bytes (1 GB = 10^9 bytes), the median of several
repetitions; `kernels` is a codec's own work on the device, `whole` adds the way of the frames to and from the host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from tensor_cases import CASES, model_like  # noqa: E402 - of the tests

from kvobj.gpu import HostDevice, open_device, status  # noqa: E402
from kvobj.gpu.codec_copies import ChunkToEncode, DeviceCodecs, FrameToDecode  # noqa: E402
from kvobj.gpu.copies import Copies, Copy  # noqa: E402
from kvobj.gpu.device import CopyKind, Device  # noqa: E402
from kvobj.gpu.lane import Lane  # noqa: E402
from kvobj.gpu.pool import DevicePin, DevicePool  # noqa: E402
from kvobj.gpu.tensors import DeviceChunk  # noqa: E402
from kvobj.tensors.codec_protocol import BlockToEncode, Coding  # noqa: E402
from kvobj.tensors.codecs import (  # noqa: E402
    LOSSLESS,
    LOSSY,
    TensorForm,
    decode_frame,
    encode_bound,
    encode_frame,
    parse_tensor_frame,
    refusal,
    unavailable,
)
from kvobj.tensors.frame import tensor_frame_bound  # noqa: E402
from kvobj.tensors.kernels.host_memory import address_of  # noqa: E402
from kvobj.tensors.kernels.launcher import Address  # noqa: E402
from kvobj.tensors.registry import codec_named  # noqa: E402

MIB: Final = 1 << 20
CODECS: Final = ("x3", "xa", "f8", "eq57", "eq55", "eq4", "eq3", "h4")
BOUNDED_SMS: Final = 16
WAIT_SECONDS: Final = 300.0
QUICK_CASES: Final = 4

CHUNK: Final = TensorForm("kv", "bf16", layers=8, kv_heads=8, head_dim=128, tokens=256)
"""8 MiB: a quarter of the layers of a chunk of Llama-3.1-8B."""
SMALL_CHUNK: Final = TensorForm("kv", "bf16", layers=1, kv_heads=2, head_dim=64, tokens=32)


class World:
    """A device with room on it."""

    def __init__(self, device: Device, capacity_bytes: int) -> None:
        self.device = device
        self.pool = DevicePool(device, capacity_bytes=capacity_bytes)
        self.copies = Copies(device, deadline_seconds=WAIT_SECONDS)
        self.codecs = DeviceCodecs(device, deadline_seconds=WAIT_SECONDS)

    def room(self, size_bytes: int) -> DevicePin:
        """Device memory."""
        pin = self.pool.try_reserve(size_bytes)
        if pin is None:
            raise SystemExit(f"the device has no {size_bytes} bytes left")
        return pin

    def put(self, plain: bytes | memoryview) -> DevicePin:
        """A copy on the device."""
        view = memoryview(plain)
        pin = self.room(len(view))
        self.wait(self.copies.begin(CopyKind.TO_DEVICE, [Copy(pin.address, address_of(view), len(view))]))
        return pin

    def bytes_of(self, pin: DevicePin, size_bytes: int) -> bytes:
        """A copy on the host."""
        into = bytearray(size_bytes)
        view = memoryview(into)
        self.wait(self.copies.begin(CopyKind.TO_HOST, [Copy(address_of(view), pin.address, size_bytes)]))
        return bytes(into)

    @staticmethod
    def wait(work: Future[None]) -> None:
        """Until it is done."""
        work.result(WAIT_SECONDS)

    def close(self) -> None:
        """Give everything back."""
        self.codecs.close()
        self.copies.close()
        self.pool.close()
        self.device.close()


def usable() -> list[str]:
    """The codecs that this checkout has."""
    return [codec for codec in CODECS if codec in LOSSLESS | LOSSY and unavailable(codec) is None]


def on_cpu(plain: bytes, form: TensorForm, codec: str) -> memoryview:
    """The frame that the CPU makes."""
    room = memoryview(bytearray(encode_bound(codec, form)))
    return room[: encode_frame(memoryview(plain), room, codec=codec, form=form)]


def parity(world: World, *, cases: int | None = None) -> dict[str, Any]:
    """Every codec and every case of the golden vectors, or so many: frames and decoded bytes against the CPU's."""
    checked, differ = 0, []
    for codec in usable():
        for name, case in list(CASES.items())[:cases]:
            if refusal(codec, case.form) is not None:
                continue
            plain = case.make(case.form)
            frame = on_cpu(plain, case.form, codec)
            head = parse_tensor_frame(frame, len(frame))
            decoded = memoryview(bytearray(head.plain_bytes))
            decode_frame(frame, head, decoded)
            source, target = world.put(plain), world.room(head.plain_bytes)
            into = memoryview(bytearray(tensor_frame_bound(case.form)))
            encoding, lengths = world.codecs.begin_encode([ChunkToEncode(source.address, case.form, codec, into)])
            world.wait(encoding)
            decoding, answers = world.codecs.begin_decode([FrameToDecode(frame, head, target.address)])
            world.wait(decoding)
            checked += 1
            if into[: lengths()[0]] != frame:
                differ.append(f"{codec} {name}: frame")
            if answers()[0] is not None or world.bytes_of(target, head.plain_bytes) != decoded:
                differ.append(f"{codec} {name}: decoded")
            source.release()
            target.release()
    return {"cases": checked, "differ": differ}


def seconds_of(work: Callable[[], object], repetitions: int) -> float:
    """The median time of a call, after one that warms up."""
    work()
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def codec_speeds(world: World, codec: str, form: TensorForm, chunks: int, repetitions: int) -> dict[str, float]:
    """GB/s of plain bytes of a batch of chunks, each way."""
    frame = on_cpu(model_plain(form), form, codec)
    head = parse_tensor_frame(frame, len(frame))
    batch_bytes = form.plain_bytes * chunks
    sources = [world.put(model_plain(form)) for _ in range(chunks)]
    rooms = [memoryview(bytearray(tensor_frame_bound(form))) for _ in range(chunks)]
    to_encode = [
        ChunkToEncode(pin.address, form, codec, room, digest=head.digest)
        for pin, room in zip(sources, rooms, strict=True)
    ]
    to_decode = [FrameToDecode(frame, head, pin.address, is_checked=True) for pin in sources]
    figures = {
        "encode_kernels": batch_bytes / encode_kernel_seconds(world, codec, form, sources, repetitions) / 1e9,
        "encode_whole": batch_bytes
        / seconds_of(lambda: world.wait(world.codecs.begin_encode(to_encode)[0]), repetitions)
        / 1e9,
        "decode_whole": batch_bytes
        / seconds_of(lambda: world.wait(world.codecs.begin_decode(to_decode)[0]), repetitions)
        / 1e9,
    }
    lying = [world.put(frame) for _ in range(chunks)]
    there = [
        FrameToDecode(None, head, pin.address, at=at.address, is_checked=True)
        for pin, at in zip(sources, lying, strict=True)
    ]
    seconds = seconds_of(lambda: world.wait(world.codecs.begin_decode(there)[0]), repetitions)
    figures["decode_kernels"] = batch_bytes / seconds / 1e9
    figures["ratio"] = form.plain_bytes / len(frame)
    for pin in (*sources, *lying):
        pin.release()
    return figures


def encode_kernel_seconds(
    world: World, codec: str, form: TensorForm, sources: list[DevicePin], repetitions: int
) -> float:
    """Seconds of encoding a batch into slots on the device, the lengths known at the end."""
    found, stream = codec_named(codec), world.device.new_stream()
    launcher, lane = world.device.launcher(stream), Lane(stream, name="bench", deadline_seconds=WAIT_SECONDS)
    slot_bytes = -(-max(found.slot_bytes(form), form.block_bytes) // 256) * 256
    is_lossy = codec not in LOSSLESS
    count = form.blocks * len(sources)
    slots = world.room(slot_bytes * count)
    decoded = world.room(form.block_bytes * count) if is_lossy else None
    blocks = []
    for at, pin in enumerate(sources):
        for number in range(form.blocks):
            place = at * form.blocks + number
            blocks.append(
                BlockToEncode(
                    number,
                    Address(pin.address + number * form.block_bytes),
                    Address(slots.address + place * slot_bytes),
                    None if decoded is None else Address(decoded.address + place * form.block_bytes),
                )
            )

    def once() -> None:
        world.wait(lane.submit(lambda _: found.encode(launcher, Coding(form), blocks), 0))

    seconds = seconds_of(once, repetitions)
    lane.close()
    slots.release()
    if decoded is not None:
        decoded.release()
    return seconds


_plains: dict[TensorForm, bytes] = {}


def model_plain(form: TensorForm) -> bytes:
    """Values as of a model: one small block of them, repeated with the sign changed now and then, so that it is made quickly."""
    found = _plains.get(form)
    if found is None:
        block = model_like(SMALL_CHUNK)
        found = _plains[form] = (block * -(-form.plain_bytes // len(block)))[: form.plain_bytes]
    return found


def copy_speeds(world: World, size_bytes: int, repetitions: int) -> dict[str, float]:
    """GB/s of our copies from and to registered memory, and of the driver's own on a bare stream."""
    memory = bytearray(size_bytes)
    view = memoryview(memory)
    address = int(address_of(view))
    world.device.register(address, size_bytes)
    pin = world.room(size_bytes)
    stream = world.device.new_stream()
    figures: dict[str, float] = {}
    for name, kind in (("to_device", CopyKind.TO_DEVICE), ("to_host", CopyKind.TO_HOST)):
        to_device = kind is CopyKind.TO_DEVICE
        copy = Copy(pin.address, address, size_bytes) if to_device else Copy(address, pin.address, size_bytes)

        def bare(copy: Copy = copy, kind: CopyKind = kind) -> None:
            stream.copy(copy.destination, copy.source, copy.size_bytes, kind)
            stream.wait()

        def ours(copy: Copy = copy, kind: CopyKind = kind) -> None:
            world.wait(world.copies.begin(kind, [copy]))

        figures[f"{name}_driver"] = size_bytes / seconds_of(bare, repetitions) / 1e9
        figures[f"{name}_ours"] = size_bytes / seconds_of(ours, repetitions) / 1e9
        figures[f"{name}_part"] = figures[f"{name}_ours"] / figures[f"{name}_driver"]
    stream.close()
    world.device.unregister(address)
    pin.release()
    return figures


def hand_over(world: World, repetitions: int) -> dict[str, Any]:
    """A chunk as others' tensor: microseconds, and whether it is the very memory."""
    pin = world.put(bytes(range(256)) * 4096)
    chunk = DeviceChunk(pin, world.device)
    if world.device.kind == "cuda":
        import cupy  # noqa: PLC0415 - only where there is a GPU

        take: Callable[[], Any] = lambda: cupy.from_dlpack(chunk.view((MIB,), "uint8", read_only=False))  # noqa: E731
        address = int(take().data.ptr)
    else:
        import numpy as np  # noqa: PLC0415 - only here

        take = lambda: np.from_dlpack(chunk.view((MIB,), "uint8"))  # noqa: E731
        address = int(take().ctypes.data)
    found = {
        "microseconds": seconds_of(take, max(repetitions, 100)) * 1e6,
        "is_the_same_memory": address == chunk.address,
    }
    chunk.release()
    return found


def run(device: Device, *, quick: bool) -> dict[str, Any]:
    """Everything on one device, which is closed."""
    form, chunks, repetitions = (SMALL_CHUNK, 2, 2) if quick else (CHUNK, 16, 9)
    capacity = 32 * MIB if quick else 4096 * MIB
    facts = asdict(device.facts())
    world = World(device, capacity)
    try:
        figures: dict[str, Any] = {
            "device": facts,
            "parity": parity(world, cases=QUICK_CASES if quick else None),
            "chunk_bytes": form.plain_bytes,
            "chunks": chunks,
            "gigabytes_per_second": {
                codec: codec_speeds(world, codec, form, chunks, repetitions)
                for codec in usable()
                if refusal(codec, form) is None
            },
            "copies": copy_speeds(world, MIB if quick else 256 * MIB, repetitions),
            "hand_over": hand_over(world, repetitions),
        }
    finally:
        world.close()
    return figures


def per_sm(figures: dict[str, Any], sms: int) -> dict[str, Any]:
    """The kernels' figures divided by the multiprocessors that they ran on."""
    return {
        codec: {name: value / sms for name, value in speeds.items() if name.endswith("_kernels")}
        for codec, speeds in figures["gigabytes_per_second"].items()
    }


def commit() -> str:
    """The checkout's commit, or nothing."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip()


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--ordinal", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: says nothing about speed")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    if options.device == "cuda" and not status().is_usable:
        print(f"no GPU to measure: {status().detail}", file=sys.stderr)
        return 2

    def opened(max_sms: int | None = None) -> Device:
        return HostDevice(8192 * MIB) if options.device == "host" else open_device(options.ordinal, max_sms=max_sms)

    figures: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "is_measurement": options.device == "cuda" and not options.quick,
        "all_sms": run(opened(), quick=options.quick),
    }
    if options.device == "cuda":
        bounded = run(opened(BOUNDED_SMS), quick=options.quick)
        figures["bounded_sms"] = {"sms": BOUNDED_SMS, **bounded, "per_sm": per_sm(bounded, BOUNDED_SMS)}
        figures["per_sm"] = per_sm(figures["all_sms"], figures["all_sms"]["device"]["sms"])
    text = json.dumps(figures, indent=1)
    if options.json is None:
        print(text)
    else:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    differ = figures["all_sms"]["parity"]["differ"] + figures.get("bounded_sms", {}).get("parity", {}).get("differ", [])
    for line in differ:
        print(f"differs from the CPU: {line}", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
