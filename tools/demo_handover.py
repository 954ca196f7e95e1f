"""Hands a KV cache from a prefill process to a decode process through kvobj, in four ways, and says when attention could begin.

    python tools/demo_handover.py [--link-mib-s 100] [--chunks 4] [--out FILE]

A small transformer with random weights (`tools/handover/model.py`) runs in two processes of the engines' environment (torch on the
CPU), the store in a third. `push`: prefill puts each layer as it is made, decode follows. `whole`: chunks are put and read whole.
`pull`: put whole, read by layers of all chunks. `shared`: as pull, after prefill has ended. Each way is run several times, medians
are shown; tokens and bits are compared with a run without any hand-over.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from command_line import Parser, amount, one_or_more, output_file, run_tool

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from server_process import MIB, BucketSetting, ServerProcess, ServerSettings  # noqa: E402 - a test's server, see above

PYTHON = ROOT / ".envs" / "engines" / "bin" / "python"
MODES = ("push", "whole", "pull", "shared")
BUCKET = "cache"
ANSWER_SECONDS = 120.0

WHEN = {
    "push": "decode waits for this very prompt (disaggregated prefill): transfer hides behind prefill's computing",
    "whole": "simplest; fine where a chunk is small beside the computing, or order does not put layers first",
    "pull": "decode decides late, or wants a part: transfer hides behind its own computing, layer by layer",
    "shared": "the prompt comes again later, elsewhere, after a restart: nothing is computed a second time",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is handed over, how often, and over which link (0: as fast as the loopback is)."""

    chunks: int = 4
    tokens: int = 16
    runs: int = 3
    link_mib_s: float = 0.0
    shape: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Handover:
    """One hand-over, in seconds since prefill began; of `shared` since decode asked. `computed`: prefill was done."""

    mode: str
    first_layer: float
    first_token: float
    computed: float | None
    tokens: tuple[int, ...]
    same_tokens: bool
    same_bits: bool


class Worker:
    """A process of the engines' environment that takes jobs, a line each. A context manager: leaving kills it."""

    def __init__(self, module: str, log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(PYTHON), "-m", f"handover.{module}"],
                env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def begin(self, job: dict[str, object]) -> None:
        """Give it a job."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()

    def until_done(self) -> dict[str, dict[str, Any]]:
        """What it says of the job, by event. RuntimeError with its log where it fails, or says nothing for too long."""
        said: dict[str, dict[str, Any]] = {}
        while "done" not in said:
            try:
                line = self._lines.get(timeout=ANSWER_SECONDS)
            except queue.Empty:
                line = ""
            if not line:
                raise RuntimeError("\n".join(self._log.read_text(errors="replace").splitlines()[-20:]))
            fields: dict[str, Any] = json.loads(line)
            said[fields.pop("event")] = fields
        return said

    def end(self) -> None:
        """Let it end by itself, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(ANSWER_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def hand_over(plan: Plan, server: ServerProcess, directory: Path) -> tuple[list[Handover], str]:
    """Every way, `runs` times each in turn, and torch's version. `shared` comes last: prefill ends before its first read."""
    keys = server.credentials()
    done: list[Handover] = []

    def job(mode: str, run: int) -> dict[str, object]:
        return {
            "mode": mode,
            "endpoint": server.endpoint,
            "access_key": keys.access_key,
            "secret_key": keys.secret_key,
            "bucket": BUCKET,
            "namespace": f"{mode}-{run}",
            "chunks": plan.chunks,
            "tokens": plan.tokens,
            "link_mib_s": plan.link_mib_s,
            "shape": dict(plan.shape),
        }

    with Worker("decode", directory / "decode.log") as decode:
        with Worker("prefill", directory / "prefill.log") as prefill:
            for worker in (prefill, decode):
                worker.begin(job("warm", 0))
            prefill.until_done()
            torch_version = str(decode.until_done()["done"]["torch"])
            for run in range(plan.runs):  # in turn, so that whatever else the machine does falls on all ways alike
                for mode in MODES[:-1]:
                    decode.begin(job(mode, run))
                    prefill.begin(job(mode, run))
                    made = prefill.until_done()
                    done.append(
                        _handover(mode, made["begun"]["at"], made["computed"]["at"], decode.until_done()["done"])
                    )
            for run in range(plan.runs):
                prefill.begin(job("shared", run))
                prefill.until_done()
            prefill.end()
        for run in range(plan.runs):
            decode.begin(job("shared", run))
            came = decode.until_done()["done"]
            done.append(_handover("shared", came["begun"], None, came))
    return done, torch_version


def _handover(mode: str, begun: float, computed: float | None, came: dict[str, Any]) -> Handover:
    return Handover(
        mode=mode,
        first_layer=came["first_layer"] - begun,
        first_token=came["first_token"] - begun,
        computed=None if computed is None else computed - begun,
        tokens=tuple(came["tokens"]),
        same_tokens=came["same_tokens"],
        same_bits=came["same_bits"],
    )


def table(plan: Plan, done: list[Handover]) -> str:
    """The medians of each way, in milliseconds, and when it is best."""
    lines = [
        f"{'way':<8}{'first layer':>14}{'prefill done':>15}{'first token':>14}{'after prefill':>16}{'tokens':>9}{'bits':>7}"
    ]
    for mode in MODES:
        runs = [each for each in done if each.mode == mode]
        computed = [each.computed for each in runs if each.computed is not None]
        after = [each.first_token - each.computed for each in runs if each.computed is not None]
        lines.append(
            f"{mode:<8}{_ms([each.first_layer for each in runs]):>14}{_ms(computed) if computed else 'gone':>15}"
            f"{_ms([each.first_token for each in runs]):>14}{_ms(after) if after else '':>16}"
            f"{'same' if all(each.same_tokens for each in runs) else 'OTHER':>9}"
            f"{'same' if all(each.same_bits for each in runs) else 'OTHER':>7}"
        )
    link = (
        "the loopback as it is"
        if not plan.link_mib_s
        else f"paced to {plan.link_mib_s:g} MiB/s by each client (sleeps)"
    )
    lines.append("since prefill began; shared: since decode asked, prefill's process had ended before")
    lines.append(f"medians of {plan.runs} runs in turn; link: {link}")
    lines += ["best when:", *(f"  {mode:<8}{WHEN[mode]}" for mode in MODES)]
    return "\n".join(lines)


def _ms(seconds: list[float]) -> str:
    return f"{median(seconds) * 1000:.0f} ms"


def describe(plan: Plan, shape: dict[str, int], torch_version: str) -> str:
    """What ran, where."""
    layer_bytes = 2 * shape["kv_heads"] * shape["chunk_tokens"] * shape["head_dim"] * 4
    size_bytes = plan.chunks * shape["layers"] * layer_bytes
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return (
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d}, {os.cpu_count()} cores of {processor}, Python {platform.python_version()}, "
        f"torch {torch_version}\n"
        f"{shape['layers']} layers, hidden {shape['hidden']}, {shape['heads']} heads on {shape['kv_heads']}, fp32; prompt of "
        f"{plan.chunks} chunks of {shape['chunk_tokens']} tokens: {size_bytes / MIB:.1f} MiB of KV, {layer_bytes / 1024:.0f} KiB a "
        f"layer and chunk; {plan.tokens} tokens generated"
    )


SHAPE = {
    "layers": 8,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "inner": 1408,
    "vocabulary": 1024,
    "chunk_tokens": 256,
    "seed": 5,
}


def server_settings() -> ServerSettings:
    """A store that has room for a few runs in memory."""
    bucket = BucketSetting(BUCKET, kind="kv", durability="memory")
    return ServerSettings(dram_bytes=512 * MIB, nvme_bytes=1024 * MIB, buckets=(bucket,))


def main() -> int:
    """Run the demo; the exit status is 0 where every token and bit was the same."""
    parser = Parser(__doc__)
    parser.add_argument("--link-mib-s", type=amount, default=0.0, help="pace both clients' transfers to this rate")
    parser.add_argument("--chunks", type=one_or_more, default=4)
    parser.add_argument("--tokens", type=one_or_more, default=16, help="tokens to generate")
    parser.add_argument("--runs", type=one_or_more, default=3)
    parser.add_argument("--out", type=output_file, help="also append the output to this file")
    asked = parser.parse_args()
    if not PYTHON.exists():
        print("torch's environment is missing: make engine-envs", file=sys.stderr)
        return 2
    plan = Plan(asked.chunks, asked.tokens, asked.runs, asked.link_mib_s, tuple(SHAPE.items()))
    with tempfile.TemporaryDirectory() as name, ServerProcess(Path(name) / "server", server_settings()) as server:
        done, torch_version = hand_over(plan, server, Path(name))
    text = f"{describe(plan, SHAPE, torch_version)}\n\n{table(plan, done)}\n"
    print(text)
    if asked.out is not None:
        with asked.out.open("a") as out:
            out.write(text + "\n")
    return 0 if all(each.same_tokens and each.same_bits for each in done) else 1


if __name__ == "__main__":
    run_tool(main)
