"""Shows what codecs are worth: two stores with the same small tiers, one that holds chunks as they are put and one that codes them.

    python tools/demo_codecs.py [--dram-mib 64] [--chunk-tokens 64] [--dram x3] [--nvme xa]

Both are filled with the same generated chunks of KV until memory holds no more; then it says how many chunks each tier holds, what
each codec saves, and how long reads take: from memory and, after a restart, from the home tier, plain or as frames that the reader
decodes. Each chunk that is read is compared with what was put. Times are medians of reads in turn, on a machine that may be busy:
look at the ratios.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from blake3 import blake3
from command_line import Parser, codec_name, one_or_more, run_tool
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until  # noqa: E402 - a test's server, see above

from kvobj.client import Credentials, KvClient, Namespace  # noqa: E402 - of this tree
from kvobj.client.kv_values import RAW  # noqa: E402 - of this tree
from kvobj.client.kv_values import ROOT as NO_PARENT  # noqa: E402 - of this tree
from kvobj.tensors.codecs import decode_frame, parse_tensor_frame, unavailable  # noqa: E402 - of this tree
from kvobj.tensors.form import TensorForm  # noqa: E402 - of this tree

BUCKET = "cache"
CONTENTS = 8
"""Chunks have one of so many contents, each under many names: drawing numbers takes longer than storing them."""
PRESSED_SHARE = 0.7
"""From here on a store codes what nobody has read for half a second, not five."""
FRUITLESS = 2
"""So many pairs of chunks more that memory lets go of others for are enough to call it full."""
SETTLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes and codecs; `reads` of each kind."""

    dram_mib: int = 64
    chunk_tokens: int = 64
    layers: int = 16
    dram: str = "x3"
    nvme: str = "xa"
    reads: int = 12

    @property
    def form(self) -> TensorForm:
        """Of a chunk: four heads of 128, bf16."""
        return TensorForm("kv", "bf16", self.layers, 4, 128, self.chunk_tokens)


@dataclass(slots=True)
class Held:
    """What one tier of a store holds, as `kvobj-admin status` tells it."""

    chunks: int
    plain_bytes: int
    stored_bytes: int
    codecs: dict[str, float]


@dataclass(slots=True)
class Reads:
    """Reads of one kind: seconds, and bytes over the wire, of each."""

    seconds: list[float] = field(default_factory=list)
    wire_bytes: list[int] = field(default_factory=list)


class Store:
    """One server and its namespace."""

    def __init__(self, plan: Plan, server: ServerProcess, codecs: dict[str, str]) -> None:
        self.server = server
        self.names: list[bytes] = []
        self._form = plan.form
        layout = {"kind": "kv", "dtype": "bf16", "layers": plan.layers, "kv_heads": 4, "head_dim": 128}
        self._declaration = {"model": "demo", "chunk_tokens": plan.chunk_tokens, "ids": "kvobj", "layout": layout}
        self.client = self._client()
        self.namespace: Namespace = self.client.declare_namespace("demo", {**self._declaration, "codecs": codecs})

    def _client(self) -> KvClient:
        keys = self.server.credentials()
        return KvClient(self.server.endpoint, Credentials(keys.access_key, keys.secret_key), BUCKET, same_host=False)

    def put(self, contents: Sequence[bytes]) -> None:
        """One more chunk, the root of a chain of one."""
        number = len(self.names)
        (name,) = self.namespace.chunk_ids([number] * self._form.tokens)
        self.client.put_chunk(name, contents[number % CONTENTS], namespace=self.namespace, parent=NO_PARENT)
        self.names.append(name)

    def held(self, tier: str) -> Held:
        """What the tier holds."""
        told = self.server.tier(tier)
        codecs = {str(each["codec"]): each for each in told["codecs"]}
        return Held(
            chunks=int(told["blobs"]),
            plain_bytes=sum(int(each["plain_bytes"]) for each in codecs.values()),
            stored_bytes=sum(int(each["stored_bytes"]) for each in codecs.values()),
            codecs={codec: float(each["ratio"]) for codec, each in codecs.items()},
        )

    def fill(self, contents: Sequence[bytes], codec: str) -> None:
        """Put until memory, with everything in it in this codec, holds no more than before."""
        pressed_bytes = PRESSED_SHARE * int(self.server.tier("dram")["capacity_bytes"])
        most, fruitless = 0, 0
        while fruitless < FRUITLESS:
            for _ in range(2):
                self.put(contents)
            if self._used_bytes() < pressed_bytes:
                continue
            self.server.admin("POST", "/api/v1/flush")
            wait_until(
                lambda: self._used_bytes() < pressed_bytes or self._is_all_in(codec),
                timeout_seconds=SETTLE_SECONDS,
                what="memory to be coded",
            )
            now = self.held("dram").chunks
            most, fruitless = max(most, now), fruitless + 1 if now <= most else 0
        wait_until(lambda: self._is_all_in(codec), timeout_seconds=SETTLE_SECONDS, what="memory to be coded")

    def _used_bytes(self) -> int:
        return int(self.server.tier("dram")["used_bytes"])

    def _is_all_in(self, codec: str) -> bool:
        return set(self.held("dram").codecs) <= {codec}

    def where(self, name: bytes) -> tuple[str, str]:
        """Tier and codec of a chunk."""
        (detail,) = self.client.match(namespace=self.namespace, ids=[name], detail=True).chunks
        return detail.tier, detail.codec

    def restart(self) -> None:
        """A clean stop, after which memory holds nothing."""
        self.client.close()
        if self.server.terminate():
            raise RuntimeError(self.server.log_tail())
        self.server.start()
        self.client = self._client()

    def read(self, name: bytes, *, accept: str | None) -> tuple[int, memoryview]:
        """A chunk's plain bytes, and how many bytes came: plain ones, or a frame of this codec that is decoded here."""
        if accept is None:
            plain = self.client.get_chunk(name, namespace=self.namespace)
            assert plain is not None
            return len(plain), plain
        stored = self.client.get_stored(name, namespace=self.namespace, accept=[accept])
        assert stored is not None
        head = parse_tensor_frame(stored.data, len(stored.data))
        plain = memoryview(bytearray(head.plain_bytes))
        decode_frame(stored.data, head, plain)
        return len(stored.data), plain


@dataclass(slots=True)
class Shown:
    """What was seen. Reads by tier and kind: `plain`, `decoded` by the server, `frame` decoded here."""

    plain: dict[str, Held] = field(default_factory=dict)
    coded: dict[str, Held] = field(default_factory=dict)
    capacity: dict[str, int] = field(default_factory=dict)
    reads: dict[tuple[str, str], Reads] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)


def generated(form: TensorForm, seed: int) -> bytes:
    """K and V much as a model's: a size for each channel, of K some far outside, values Gaussian around a mean."""
    rng = np.random.default_rng(seed)
    heads = (form.layers, form.kinds, form.kv_heads)
    size = np.exp(0.35 * rng.standard_normal((*heads, 1, form.head_dim)))
    mean = 0.5 * rng.standard_normal((*heads, 1, form.head_dim))
    mean[:, 0, :, :, :3] *= 20.0
    values = (mean + size * rng.standard_normal((*heads, form.tokens, form.head_dim))).astype(np.float32)
    words = values.view(np.uint32)
    return bytes((((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype("<u2")).tobytes())


def compare(plan: Plan, directory: Path, say: Callable[[str], None]) -> Shown:
    """Fill both stores and read from them."""
    contents = [generated(plan.form, seed) for seed in range(CONTENTS)]
    digests = [blake3(each).digest() for each in contents]
    shown = Shown()
    with ExitStack() as stack:
        settings = ServerSettings(
            dram_bytes=plan.dram_mib * MIB,
            nvme_bytes=8 * plan.dram_mib * MIB,
            buckets=(BucketSetting(BUCKET, kind="kv", durability="memory"),),
        )
        plain, coded = (
            Store(plan, stack.enter_context(ServerProcess(directory / name, settings)), codecs)
            for name, codecs in (("plain", {}), ("coded", {"dram": plan.dram, "nvme": plan.nvme}))
        )
        stack.callback(lambda: [store.client.close() for store in (plain, coded)])  # type: ignore[func-returns-value]
        for store, codec in ((plain, RAW), (coded, plan.dram)):
            store.fill(contents, codec)
            say(f"{len(store.names)} chunks put where memory holds them as {codec}")
        shown.status = coded.server.status()
        for tier in ("dram", "nvme"):
            shown.plain[tier], shown.coded[tier] = plain.held(tier), coded.held(tier)
            shown.capacity[tier] = int(coded.server.tier(tier)["capacity_bytes"])

        def read(store: Store, tier: str, kind: str, name: bytes, accept: str | None) -> None:
            assert store.where(name)[0] == tier
            reads = shown.reads.setdefault((tier, kind), Reads())
            began = time.perf_counter()
            wire_bytes, got = store.read(name, accept=accept)
            reads.seconds.append(time.perf_counter() - began)
            reads.wire_bytes.append(wire_bytes)
            assert blake3(got).digest() == digests[store.names.index(name) % CONTENTS], "other bytes came"

        held = [[name for name in store.names if store.where(name)[0] == "dram"] for store in (plain, coded)]
        for number in range(plan.reads):  # in turn, so that whatever else the machine does falls on all alike
            read(plain, "dram", "plain", held[0][-1 - number % len(held[0])], None)
            name = held[1][-1 - number % len(held[1])]
            read(coded, "dram", "decoded", name, None)
            read(coded, "dram", "frame", name, plan.dram)
        say("read from memory")
        for store in (plain, coded):
            store.restart()
        for number in range(min(plan.reads, len(plain.names), len(coded.names))):
            read(plain, "nvme", "plain", plain.names[number], None)
            read(coded, "nvme", "frame", coded.names[number], plan.nvme)
            read(coded, "nvme", "decoded", coded.names[number], None)  # last: it goes up to memory with it
        say("read from the home tier, after a restart")
    return shown


def show(plan: Plan, shown: Shown, console: Console) -> None:
    """Tables."""
    form, codecs = plan.form, {"dram": plan.dram, "nvme": plan.nvme}
    console.print(
        f"chunks of {form.plain_bytes / MIB:g} MiB ({form.layers} layers, {form.kv_heads} heads of {form.head_dim}, "
        f"{form.tokens} tokens, bf16, generated); CPU kernels {shown.status['gpu']['CPU kernels']}"
    )
    table = Table("tier", "codec", "chunks", "plain", "stored", "ratio", "a GiB", "of plain", title="What tiers hold")
    for tier, codec in codecs.items():
        for name, held in ((RAW, shown.plain[tier]), (codec, shown.coded[tier])):
            table.add_row(
                tier,
                name,
                str(held.chunks),
                f"{held.plain_bytes / MIB:.1f} MiB",
                f"{held.stored_bytes / MIB:.1f} MiB",
                f"{held.plain_bytes / held.stored_bytes:.3f}x",
                f"{chunks_a_gib(held):.0f}",
                f"{chunks_a_gib(held) / chunks_a_gib(shown.plain[tier]):.2f}x",
            )
    console.print(table)
    gain = shown.coded["dram"].chunks / shown.plain["dram"].chunks
    console.print(
        f"the same {plan.dram_mib} MiB of memory, full, hold {gain:.2f}x the chunks (what is on its way takes room, too)"
    )
    times = Table("from", "sent as", "decoded by", "over the wire", "median", "of plain", title="GET of a chunk")
    for (tier, kind), reads in shown.reads.items():
        plain_seconds = median(shown.reads[tier, "plain"].seconds)
        times.add_row(
            tier,
            codecs[tier] if kind == "frame" else RAW,
            {"plain": "nobody", "decoded": "the server", "frame": "the reader"}[kind],
            f"{median(reads.wire_bytes) / MIB:.2f} MiB",
            f"{median(reads.seconds) * 1000:.2f} ms",
            f"{median(reads.seconds) / plain_seconds:.2f}x",
        )
    console.print(times)


def chunks_a_gib(held: Held) -> float:
    """How many such chunks a GiB of the tier holds."""
    return held.chunks * 1024 * MIB / held.stored_bytes


def main() -> int:
    """Run the demo; the exit status is 2 where a codec cannot be used here."""
    usual = Plan()
    parser = Parser(__doc__)
    parser.add_argument("--dram-mib", type=one_or_more, default=usual.dram_mib)
    parser.add_argument("--chunk-tokens", type=one_or_more, default=usual.chunk_tokens)
    parser.add_argument("--dram", type=codec_name, default=usual.dram, help="codec of memory: x3 or xa")
    parser.add_argument("--nvme", type=codec_name, default=usual.nvme, help="codec of the home tier: x3 or xa")
    asked = parser.parse_args()
    for codec in (asked.dram, asked.nvme):
        problem = unavailable(codec)
        if problem is not None:
            sys.stderr.write(f"codec {codec} cannot be used here: {problem}\n")
            return 2
    plan = Plan(asked.dram_mib, asked.chunk_tokens, dram=asked.dram, nvme=asked.nvme)
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        shown = compare(plan, Path(name), lambda line: console.print(f"[dim]{line}[/dim]"))
    show(plan, shown, console)
    return 0


if __name__ == "__main__":
    run_tool(main)
