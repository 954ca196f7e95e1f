"""What a GPU makes of the codecs: the same bytes as the CPU, case for case, and how fast; copies; tensors without copies.

    python tools/bench_gpu.py --json docs/figures/gpu.json      # on a machine with a GPU: CuPy, torch and NVRTC installed
    python tools/bench_gpu.py --device host --quick             # the same over host memory: checks the tool, measures nothing

Exits 1 where a frame or a decoded byte differs from the CPU's. Speeds are of plain bytes (1 GB = 10^9 bytes), the median of several
repetitions, on values of the LLM-like generator (`codec_bench/kvgen.py`, made by torch; `--plain` names a file of a chunk instead):

- `kernels`: a codec's own work on the device, all launches of a batch replayed as one CUDA graph between two events, after a copy
  that leaves nothing of the batch in the L2 cache;
- `calls`: the same as a caller sees it, with Python's part, tables and lengths, by the clock;
- `whole`: with the way of the frames to and from the host's pageable memory, checksums and heads.

`floor_part` is the part of the rate that the least traffic (plain bytes once, encoded bytes once) would have at the rate of a copy
on the device, which is measured beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from command_line import Parser, codec_name, existing_file, one_or_more, output_file, run_tool, zero_or_more

REPOSITORY: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

from tensor_cases import CASES, model_like  # noqa: E402 - of the tests

from kvobj.gpu import HostDevice, open_device, status  # noqa: E402
from kvobj.gpu.codec_copies import ChunkToEncode, DeviceCodecs, FrameToDecode  # noqa: E402
from kvobj.gpu.copies import Copies, Copy  # noqa: E402
from kvobj.gpu.device import CopyKind, Device  # noqa: E402
from kvobj.gpu.pool import DevicePin, DevicePool  # noqa: E402
from kvobj.gpu.tensors import DeviceChunk  # noqa: E402
from kvobj.tensors.codec_protocol import BlockToDecode, BlockToEncode, Coding  # noqa: E402
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
from kvobj.tensors.frame import TensorFrame, tensor_frame_bound  # noqa: E402
from kvobj.tensors.kernels.host_memory import address_of  # noqa: E402
from kvobj.tensors.kernels.launcher import Address, Launcher  # noqa: E402
from kvobj.tensors.registry import codec_named  # noqa: E402

MIB: Final = 1 << 20
CODECS: Final = ("x3", "xa", "f8", "eq57", "eq55", "eq4", "eq3", "h4")
BOUNDED_SMS: Final = 16
WAIT_SECONDS: Final = 300.0
QUICK_CASES: Final = 4

CHUNK: Final = TensorForm("kv", "bf16", layers=8, kv_heads=8, head_dim=128, tokens=256)
"""8 MiB: a quarter of the layers of a chunk of Llama-3.1-8B."""
BATCHES: Final = (8, 32, 128)
"""Chunks of a batch: 64 MiB, 256 MiB, 1 GiB."""
BOUNDED_BATCHES: Final = (32,)
SPACER_BYTES: Final = 512 * MIB
"""Copied before each measurement: more than the cache, and long enough for the measured work to be queued meanwhile."""
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
    return seconds_in_turn((work,), repetitions)[0]


def seconds_in_turn(works: Sequence[Callable[[], object]], repetitions: int) -> list[float]:
    """The median time of a call of each, after one that warms up: called in turn, so that what disturbs the machine for a while
    disturbs all of them."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repetitions):
        for work, taken in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return [statistics.median(taken) for taken in times]


class Recorded:
    """See `kvobj.tensors.kernels.launcher.Launcher`: another's, whose launches are noted, to be replayed."""

    def __init__(self, inner: Launcher) -> None:
        self._inner = inner
        self.launches: list[tuple[str, int, tuple[Address | float, ...]]] = []

    @property
    def name(self) -> str:
        """See `Launcher.name`."""
        return self._inner.name

    @property
    def is_host(self) -> bool:
        """See `Launcher.is_host`."""
        return self._inner.is_host

    def launch(self, kernel: str, warps: int, *arguments: Address | float) -> None:
        """See `Launcher.launch`."""
        self.launches.append((kernel, warps, arguments))
        self._inner.launch(kernel, warps, *arguments)

    def scratch(self, slot: str, size_bytes: int) -> Address:
        """See `Launcher.scratch`."""
        return self._inner.scratch(slot, size_bytes)

    def upload(self, to: Address, data: bytes | memoryview) -> None:
        """See `Launcher.upload`."""
        self._inner.upload(to, data)

    def download(self, at: Address, into: memoryview) -> None:
        """See `Launcher.download`."""
        self._inner.download(at, into)

    def replay(self) -> None:
        """Launch again what was launched since `launches` was cleared."""
        for kernel, warps, arguments in self.launches:
            self._inner.launch(kernel, warps, *arguments)


class Bench:
    """A codec's kernels on a stream of their own. Blocking, for one thread."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._stream = world.device.new_stream()
        self.launcher = Recorded(world.device.launcher(self._stream))
        self._spacer = world.room(2 * SPACER_BYTES) if world.device.kind == "cuda" else None

    def close(self) -> None:
        """Give the spacer back."""
        if self._spacer is not None:
            self._spacer.release()
        self._stream.close()

    def seconds(self, work: Callable[[], object], repetitions: int) -> dict[str, float]:
        """Of one call of `work`, which launches kernels here: `calls` by the clock, `kernels` those launches alone, and each kernel
        under its name."""
        work()
        found = {"calls": seconds_of(work, repetitions)}
        self.launcher.launches.clear()
        work()
        if self._spacer is None:
            return {**found, "kernels": seconds_of(self.launcher.replay, repetitions)}
        whole = list(self.launcher.launches)
        found["kernels"] = self._replayed(repetitions)
        for launch in whole:
            self.launcher.launches[:] = [launch]
            found[launch[0]] = found.get(launch[0], 0.0) + self._replayed(max(3, repetitions // 3))
        return found

    def copy_seconds(self, repetitions: int) -> float:
        """Of the spacer's copy on the device."""
        import cupy  # noqa: PLC0415 - only where there is a GPU

        times = []
        for _ in range(repetitions + 1):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            self._copy_spacer()
            begin.record(self._stream.stream)  # type: ignore[attr-defined]
            self._copy_spacer()
            end.record(self._stream.stream)  # type: ignore[attr-defined]
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        return float(statistics.median(times[1:]))

    def _copy_spacer(self) -> None:
        assert self._spacer is not None
        at = self._spacer.address
        self._stream.copy(at + SPACER_BYTES, at, SPACER_BYTES, CopyKind.ON_DEVICE)

    def _replayed(self, repetitions: int) -> float:
        import cupy  # noqa: PLC0415 - only where there is a GPU

        stream = self._stream.stream  # type: ignore[attr-defined]
        stream.begin_capture()
        self.launcher.replay()
        graph = stream.end_capture()
        times = []
        for _ in range(repetitions + 1):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            self._copy_spacer()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        return float(statistics.median(times[1:]))


def codec_speeds(bench: Bench, codec: str, form: TensorForm, chunks: int, repetitions: int) -> dict[str, Any]:
    """GB/s of plain bytes of a batch of chunks, each way, and microseconds of each kernel."""
    world, plain = bench.world, plain_of(form)
    frame = on_cpu(plain, form, codec)
    head = parse_tensor_frame(frame, len(frame))
    batch_bytes = form.plain_bytes * chunks
    sources = [world.put(plain) for _ in range(chunks)]
    figures: dict[str, Any] = {"ratio": form.plain_bytes / len(frame)}
    for way, seconds in (
        ("encode", encode_seconds(bench, codec, form, sources, repetitions)),
        ("decode", decode_seconds(bench, frame, head, sources, repetitions)),
    ):
        figures[f"{way}_kernels"] = batch_bytes / seconds.pop("kernels") / 1e9
        figures[f"{way}_calls"] = batch_bytes / seconds.pop("calls") / 1e9
        figures[f"{way}_microseconds"] = {name: round(value * 1e6, 1) for name, value in seconds.items()}
    if chunks == BATCHES[0] or world.device.kind == "host":
        figures |= whole_speeds(world, codec, frame, head, sources)
    for pin in sources:
        pin.release()
    return figures


def whole_speeds(
    world: World, codec: str, frame: memoryview, head: TensorFrame, sources: list[DevicePin]
) -> dict[str, float]:
    """GB/s with the frames' way to and from the host."""
    form = head.form
    rooms = [memoryview(bytearray(tensor_frame_bound(form))) for _ in sources]
    to_encode = [
        ChunkToEncode(pin.address, form, codec, room, digest=head.digest)
        for pin, room in zip(sources, rooms, strict=True)
    ]
    to_decode = [FrameToDecode(frame, head, pin.address, is_checked=True) for pin in sources]
    batch_bytes = form.plain_bytes * len(sources)
    encode = seconds_of(lambda: world.wait(world.codecs.begin_encode(to_encode)[0]), 3)
    decode = seconds_of(lambda: world.wait(world.codecs.begin_decode(to_decode)[0]), 3)
    return {"encode_whole": batch_bytes / encode / 1e9, "decode_whole": batch_bytes / decode / 1e9}


def encode_seconds(
    bench: Bench, codec: str, form: TensorForm, sources: list[DevicePin], repetitions: int
) -> dict[str, float]:
    """Seconds of encoding a batch into slots on the device, the lengths known at the end."""
    found, world = codec_named(codec), bench.world
    slot_bytes = -(-max(found.slot_bytes(form), form.block_bytes) // 256) * 256
    plain_bytes = -(-form.block_bytes // 256) * 256
    count = form.blocks * len(sources)
    slots = world.room(slot_bytes * count)
    decoded = world.room(plain_bytes * count) if codec not in LOSSLESS else None
    blocks = [
        BlockToEncode(
            at % form.blocks,
            Address(sources[at // form.blocks].address + at % form.blocks * form.block_bytes),
            Address(slots.address + at * slot_bytes),
            None if decoded is None else Address(decoded.address + at * plain_bytes),
        )
        for at in range(count)
    ]
    seconds = bench.seconds(lambda: found.encode(bench.launcher, Coding(form), blocks), repetitions)
    slots.release()
    if decoded is not None:
        decoded.release()
    return seconds


def decode_seconds(
    bench: Bench, frame: memoryview, head: TensorFrame, targets: list[DevicePin], repetitions: int
) -> dict[str, float]:
    """Seconds of decoding a batch of frames that lie on the device, the statuses known at the end."""
    found, form = codec_named(head.codec), head.form
    lying = [bench.world.put(frame) for _ in targets]
    blocks = [
        BlockToDecode(
            number, Address(at.address + block.offset), block.length, Address(to.address + number * form.block_bytes)
        )
        for at, to in zip(lying, targets, strict=True)
        for number, block in enumerate(head.blocks)
    ]

    def work() -> None:
        assert not any(found.decode(bench.launcher, Coding(form), blocks)), "the CPU's frames decode"

    seconds = bench.seconds(work, repetitions)
    for pin in lying:
        pin.release()
    return seconds


_plains: dict[TensorForm, bytes] = {}


def plain_of(form: TensorForm) -> bytes:
    """Values of the generator in the form's order (heads before tokens); of a small form, those of the tests."""
    found = _plains.get(form)
    if found is None:
        found = _plains[form] = model_like(form) if form == SMALL_CHUNK else generated(form)
    return found


def generated(form: TensorForm) -> bytes:
    """One window of `codec_bench/kvgen.py`, seed 7."""
    import torch  # noqa: PLC0415 - only for speeds
    from codec_bench import kvgen  # noqa: PLC0415 - needs torch

    (window,) = kvgen.windows(
        1, seed=7, layers=form.layers, tokens=form.tokens, q_heads=form.kv_heads, kv_heads=form.kv_heads,
        head_dim=form.head_dim,
    )  # fmt: skip
    made = torch.stack([torch.stack([k, v]) for _, k, v in window]).permute(0, 1, 3, 2, 4).contiguous()
    return bytes(made.view(torch.uint8).numpy().tobytes())


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

        driver_seconds, our_seconds = seconds_in_turn((bare, ours), repetitions)
        figures[f"{name}_driver"] = size_bytes / driver_seconds / 1e9
        figures[f"{name}_ours"] = size_bytes / our_seconds / 1e9
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


def run(
    device: Device, *, quick: bool, batches: Sequence[int] = BATCHES, codecs: Sequence[str] = CODECS
) -> dict[str, Any]:
    """Everything on one device, which is closed."""
    form, repetitions = (SMALL_CHUNK, 2) if quick else (CHUNK, 15)
    batches = (2,) if quick else batches
    facts = asdict(device.facts())
    world = World(device, 32 * MIB if quick else 16384 * MIB)
    try:
        figures: dict[str, Any] = {
            "device": facts,
            "parity": parity(world, cases=QUICK_CASES if quick else None),
            "copies": copy_speeds(world, MIB if quick else 256 * MIB, repetitions),
            "hand_over": hand_over(world, repetitions),
            "chunk_bytes": form.plain_bytes,
        }
        bench = Bench(world)
        if device.kind == "cuda":
            figures["device_copy"] = 2 * SPACER_BYTES / bench.copy_seconds(repetitions) / 1e9
        figures["gigabytes_per_second"] = {
            str(chunks): {
                codec: progress(
                    codec,
                    chunks,
                    with_floors(codec_speeds(bench, codec, form, chunks, repetitions), figures.get("device_copy")),
                )
                for codec in codecs
                if codec in usable() and refusal(codec, form) is None
            }
            for chunks in batches
        }
        bench.close()
    finally:
        world.close()
    return figures


def progress(codec: str, chunks: int, figures: dict[str, Any]) -> dict[str, Any]:
    """Says what was measured, on standard error."""
    print(
        codec,
        chunks,
        {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()},
        file=sys.stderr,
        flush=True,
    )
    return figures


def with_floors(figures: dict[str, Any], copy_rate: float | None) -> dict[str, Any]:
    """What part of the rate that memory allows the kernels have, given the bytes a second that a copy reads and writes."""
    if copy_rate is not None:
        least = 1 + 1 / figures["ratio"]
        for way in ("encode", "decode"):
            figures[f"{way}_floor_part"] = figures[f"{way}_kernels"] * least / copy_rate
    return figures


def per_sm(figures: dict[str, Any], sms: int) -> dict[str, Any]:
    """The kernels' figures divided by the multiprocessors that they ran on."""
    return {
        chunks: {
            codec: {name: value / sms for name, value in speeds.items() if name.endswith("_kernels")}
            for codec, speeds in of_codecs.items()
        }
        for chunks, of_codecs in figures["gigabytes_per_second"].items()
    }


def commit() -> str:
    """The checkout's commit, or nothing."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip()


def main() -> int:
    """Run what the command line says."""
    parser = Parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--ordinal", type=zero_or_more, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: says nothing about speed")
    parser.add_argument("--json", type=output_file, help="write the figures there")
    parser.add_argument("--plain", type=existing_file, help="a file of the values of a chunk")
    parser.add_argument("--codecs", nargs="+", type=codec_name, default=CODECS)
    parser.add_argument("--chunks", nargs="+", type=one_or_more, default=BATCHES, help="of a batch, 8 MiB each")
    parser.add_argument("--unbounded", action="store_true", help="leave out the run on few multiprocessors")
    options = parser.parse_args()
    if options.device == "cuda" and not status().is_usable:
        print(f"no GPU to measure: {status().detail}", file=sys.stderr)
        return 2

    if options.plain is not None:
        _plains[CHUNK] = options.plain.read_bytes()
        if len(_plains[CHUNK]) != CHUNK.plain_bytes:
            parser.error(f"{options.plain} has not the {CHUNK.plain_bytes} bytes of {CHUNK}")

    def opened(max_sms: int | None = None) -> Device:
        return HostDevice(8192 * MIB) if options.device == "host" else open_device(options.ordinal, max_sms=max_sms)

    figures: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "is_measurement": options.device == "cuda" and not options.quick,
        "all_sms": run(opened(), quick=options.quick, batches=options.chunks, codecs=options.codecs),
    }
    if options.device == "cuda" and not options.unbounded:
        bounded = run(opened(BOUNDED_SMS), quick=options.quick, batches=BOUNDED_BATCHES, codecs=options.codecs)
        figures["bounded_sms"] = {"sms": BOUNDED_SMS, **bounded, "per_sm": per_sm(bounded, BOUNDED_SMS)}
    if options.device == "cuda":
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
    run_tool(main)
