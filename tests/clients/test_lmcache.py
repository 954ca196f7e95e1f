"""LMCache's S3 adapter and its own harness, `lmcache bench l2`, against a real server: no code of kvobj's on their side.

Every request is virtual-hosted, as that adapter speaks nothing else. Where a bucket's name has to stand in front of a host that
any resolver takes for loopback, `0x7f.0x1` serves: it is 127.0.0.1 to all of them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from engine_process import EngineProcess, digest_of, needs_engines
from module_paths import ModulePaths
from recording_relay import RecordingRelay
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

needs_engines()

ORDINARY: Final = "0x7f"
CHUNKS: Final = "chunks"
BENCH_CHUNKS: Final = ("0x07f", "0x007f")
"""KV buckets that only the harness uses: its keys are the same in every run, and a chunk keeps its size."""
DOMAIN: Final = "0x1"
PART_BYTES: Final = 8 * MIB
SIZES: Final = (1, 4096, MIB, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 20 * MIB)
MODEL_PATH: Final = "/example/Model-8B%4000000001%400%40"


def settings_of(server: ServerProcess, host: str, *, port: int | None = None) -> dict[str, Any]:
    credentials = server.credentials()
    return {
        "type": "s3",
        "s3_endpoint": f"s3://{host}:{port or server.port}",
        "s3_region": credentials.region,
        "disable_tls": True,
        "s3_prefer_http2": False,
        "s3_num_io_threads": 2,
        "aws_access_key_id": credentials.access_key,
        "aws_secret_access_key": credentials.secret_key,
    }


def key(number: int, salt: str = "") -> tuple[str, str]:
    return f"{number:064x}", salt


def name_of(number: int) -> str:
    return f"example/Model-8B@00000001@0@{number:064x}"


def digests(sizes: Sequence[int], first_seed: int) -> list[str]:
    return [digest_of(size, first_seed + position) for position, size in enumerate(sizes)]


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    buckets = (
        BucketSetting(ORDINARY),
        *(BucketSetting(name, "kv", "memory") for name in (CHUNKS, *BENCH_CHUNKS)),
    )
    settings = ServerSettings(
        dram_bytes=192 * MIB,
        buckets=buckets,
        domains=("localhost", DOMAIN),
        sections={"server.hosts": {"localhost": f'"{CHUNKS}"'}, "log": {"requests": "true"}},
    )
    with ServerProcess(module_paths.mktemp("lmcache"), settings) as running:
        yield running


@pytest.fixture(scope="module")
def engine(module_paths: ModulePaths) -> Iterator[EngineProcess]:
    log = module_paths.mktemp("lmcache-engine") / "engine.log"
    environment = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING", "PYTHONHASHSEED": "0"}
    with EngineProcess("lmcache_s3.py", log, environment) as running:
        yield running


def is_untroubled(engine: EngineProcess, name: str = "adapter") -> bool:
    told: dict[str, Any] = engine.ask("status", name=name)
    return bool(told["is_healthy"]) and told["connection_failures"] == 0


class TestBench:
    def bench(
        self, engine: EngineProcess, server: ServerProcess, bucket: str, tmp_path: Path, *, size_kib: int, keys: int
    ) -> dict[str, Any]:
        """One run of the harness with verification on and half of the look-ups for keys that are not there."""
        adapter = json.dumps(settings_of(server, f"{bucket}.{DOMAIN}"))
        arguments = ["--l2-adapter", adapter, "--num-keys", str(keys), "--data-size-kb", str(size_kib)]
        arguments += ["--in-flight", "2", "--lookup-max-hit-rate", "0.5", "--no-skip-verify"]
        ran: dict[str, Any] = engine.ask("bench", arguments=arguments, output=str(tmp_path / "bench.json"))
        assert ran["exit_status"] == 0, ran["printed"]
        operations = {entry["operation"]: entry for entry in ran["report"]["metrics"].values() if "operation" in entry}
        for name, wanted in (("Store", 2 * keys), ("Load", 2 * keys), ("Lookup", keys)):
            assert operations[name]["total_success"] == wanted, ran["printed"]
            assert operations[name]["rounds_timed_out"] == 0, ran["printed"]
        assert f"All {2 * keys} keys data verified OK" in ran["printed"]
        return operations

    @pytest.mark.parametrize("size_kib", [256, 12 * 1024])
    def test_the_harness_verifies_what_an_ordinary_bucket_gives_back(
        self, engine: EngineProcess, server: ServerProcess, tmp_path: Path, size_kib: int
    ) -> None:
        self.bench(engine, server, ORDINARY, tmp_path, size_kib=size_kib, keys=4)

    @pytest.mark.parametrize(("bucket", "size_kib"), [(BENCH_CHUNKS[0], 1024), (BENCH_CHUNKS[1], 12 * 1024)])
    def test_the_harness_verifies_what_chunks_give_back_also_where_they_were_there_before(
        self, engine: EngineProcess, server: ServerProcess, tmp_path: Path, bucket: str, size_kib: int
    ) -> None:
        for _run in range(2):
            self.bench(engine, server, bucket, tmp_path, size_kib=size_kib, keys=2)

        def writes() -> Counter[tuple[str, int]]:
            lines = [line for line in server.log_path.read_text().splitlines() if line.startswith('{"time_ms"')]
            entries = [json.loads(line) for line in lines]
            return Counter(
                (entry["operation"], entry["status"])
                for entry in entries
                if entry.get("bucket") == bucket and entry["method"] in {"PUT", "POST"}
            )

        # Two rounds a run, a warm-up and a measured one, of two submits of two keys.
        whole = {("PutObject", 200): 16}
        parts = {("CreateMultipartUpload", 200): 16, ("UploadPart", 200): 32, ("CompleteMultipartUpload", 200): 16}
        expected = whole if size_kib < PART_BYTES // 1024 else parts
        wait_until(lambda: writes() == expected, timeout_seconds=10, what="each store to be answered with 200")


class TestAdapter:
    @pytest.mark.parametrize("host", [f"{ORDINARY}.{DOMAIN}", "localhost"])
    def test_what_one_process_stores_another_finds_and_loads_whole(
        self, engine: EngineProcess, server: ServerProcess, host: str
    ) -> None:
        """`localhost` is an entry of `[server.hosts]`, here for a KV bucket."""
        keys = [key(100 + position, "tenant-1" if position % 2 else "") for position in range(len(SIZES))]
        engine.ask("open", name="adapter", settings=settings_of(server, host))
        stored = [(*pair, 100 + position) for position, pair in enumerate(zip(keys, SIZES, strict=True))]
        assert engine.ask("store", name="adapter", objects=stored)
        engine.ask("open", name="adapter", settings=settings_of(server, host))  # it has to ask, now
        assert engine.ask("look_up", name="adapter", keys=[*keys, key(99)]) == [True] * len(keys) + [False]
        loaded = engine.ask("load", name="adapter", objects=list(zip(keys, SIZES, strict=True)))
        assert loaded["digests"] == digests(SIZES, 100)
        assert is_untroubled(engine)

    def test_what_it_sends_is_what_is_written_of_it(self, engine: EngineProcess, server: ServerProcess) -> None:
        sizes = (MIB, 20 * MIB)
        with RecordingRelay(server.port) as relay:
            host = f"{ORDINARY}.{DOMAIN}:{relay.port}"
            engine.ask("open", name="adapter", settings=settings_of(server, f"{ORDINARY}.{DOMAIN}", port=relay.port))
            objects = [(key(200 + position), size, 200 + position) for position, size in enumerate(sizes)]
            assert engine.ask("store", name="adapter", objects=objects)
            loaded = engine.ask("load", name="adapter", objects=[(key(200), sizes[0]), (key(201), sizes[1])])
            engine.ask("open", name="adapter", settings=settings_of(server, f"{ORDINARY}.{DOMAIN}"))
            heads = relay.heads()
        assert loaded["digests"] == digests(sizes, 200)
        assert {head.headers["host"] for head in heads} == {host}
        small, large = (f"{MODEL_PATH}{200 + position:064x}" for position in range(2))
        puts = {head.target: head.headers for head in heads if head.method == "PUT"}
        assert puts[small]["content-length"] == str(MIB)
        assert {headers["x-amz-content-sha256"] for headers in puts.values()} == {"UNSIGNED-PAYLOAD"}
        assert not any(name.startswith("x-amz-checksum") for headers in puts.values() for name in headers)
        parts = sorted(
            (target.partition("?")[2].partition("&")[0], headers["content-length"])
            for target, headers in puts.items()
            if target.startswith(large + "?")
        )
        assert parts == [
            ("partNumber=1", str(PART_BYTES)),
            ("partNumber=2", str(PART_BYTES)),
            ("partNumber=3", str(4 * MIB)),
        ]
        gets = sorted(
            (head.target, head.headers["range"], "if-match" in head.headers) for head in heads if head.method == "GET"
        )
        assert gets == [
            (small, "bytes=0-8388607", False),
            (large, "bytes=0-8388607", False),
            (large, "bytes=16777216-20971519", True),
            (large, "bytes=8388608-16777215", True),
        ]

    @pytest.mark.parametrize("bucket", [ORDINARY, CHUNKS])
    def test_what_was_deleted_behind_its_back_is_a_fast_miss_and_it_goes_on(
        self, engine: EngineProcess, server: ServerProcess, bucket: str
    ) -> None:
        host = "localhost" if bucket == CHUNKS else f"{bucket}.{DOMAIN}"
        sizes = (MIB, 9 * MIB, MIB)
        engine.ask("open", name="adapter", settings=settings_of(server, host))
        keys = [key(300 + position) for position in range(3)]
        stored = [(*pair, 300 + position) for position, pair in enumerate(zip(keys, sizes, strict=True))]
        assert engine.ask("store", name="adapter", objects=stored)
        with server.raw() as raw:
            for number in (300, 301):
                assert raw.request("DELETE", f"/{bucket}/{name_of(number)}").status == 204
        assert engine.ask("look_up", name="adapter", keys=keys) == [True] * 3  # from the sizes that it remembers
        loaded = engine.ask("load", name="adapter", objects=list(zip(keys, sizes, strict=True)))
        assert loaded["digests"] == [None, None, digest_of(MIB, 302)]
        assert loaded["seconds"] < 2, "a miss is not tried again"
        assert is_untroubled(engine)
        assert engine.ask("store", name="adapter", objects=stored[:1])
        loaded = engine.ask("load", name="adapter", objects=[(keys[0], sizes[0])])
        assert loaded["digests"] == [digest_of(MIB, 300)]

    def test_it_lists_by_pages_and_deletes(self, engine: EngineProcess, server: ServerProcess) -> None:
        engine.ask("open", name="adapter", settings=settings_of(server, "localhost"))
        objects = [(key(400 + position), 1000 + position, position) for position in range(5)]
        assert engine.ask("store", name="adapter", objects=objects)
        pages = engine.ask("list", name="adapter", page_size=2)
        assert [len(page) for page in pages[:-1]] == [2] * (len(pages) - 1)
        listed = {found: size for page in pages for found, size in page}
        assert [listed[f"{400 + position:064x}"] for position in range(5)] == [1000 + position for position in range(5)]
        engine.ask("delete", name="adapter", keys=[key(400), key(401), key(999)])
        engine.ask("open", name="adapter", settings=settings_of(server, "localhost"))
        assert engine.ask("look_up", name="adapter", keys=[key(400 + position) for position in range(5)]) == [
            False,
            False,
            True,
            True,
            True,
        ]
        assert is_untroubled(engine)


def test_a_store_that_is_too_small_gives_misses_and_never_wrong_bytes(engine: EngineProcess, tmp_path: Path) -> None:
    """Twice what fits: what policy removed is a miss for an adapter that is sure of it."""
    settings = ServerSettings(
        dram_bytes=64 * MIB,
        nvme_bytes=64 * MIB,
        buckets=(BucketSetting(CHUNKS, "kv", "memory"),),
        sections={"server.hosts": {"localhost": f'"{CHUNKS}"'}, "gc": {"grace": '"1 s"'}},
    )
    count, size = 128, MIB
    with ServerProcess(tmp_path / "small", settings) as small:
        engine.ask("open", name="small", settings=settings_of(small, "localhost"))
        for first in range(0, count, 16):
            objects = [(key(number), size, number) for number in range(first, first + 16)]
            assert engine.ask("store", name="small", objects=objects)
        keys = [key(number) for number in range(count)]
        assert engine.ask("look_up", name="small", keys=keys) == [True] * count
        found = 0
        for first in range(0, count, 32):
            loaded = engine.ask("load", name="small", objects=[(one, size) for one in keys[first : first + 32]])
            for number, digest in enumerate(loaded["digests"], start=first):
                assert digest in {None, digest_of(size, number)}
                found += digest is not None
        assert 8 <= found < count - 8
        assert is_untroubled(engine, "small")


def test_a_restart_under_held_sockets_costs_no_load_and_no_store(engine: EngineProcess, tmp_path: Path) -> None:
    """Three refused connections in a row would end the adapter for the life of its process; none is refused."""
    settings = ServerSettings(
        buckets=(BucketSetting(CHUNKS, "kv", "memory"),),
        sections={"server.hosts": {'"127.0.0.1"': f'"{CHUNKS}"'}},
        arguments=("--hold-sockets",),
    )
    sizes = [MIB] * 4
    keys = [key(500 + position) for position in range(4)]
    stored = [(*pair, 500 + position) for position, pair in enumerate(zip(keys, sizes, strict=True))]
    with ServerProcess(tmp_path / "held", settings) as held:
        engine.ask("open", name="held", settings=settings_of(held, "127.0.0.1"))
        assert engine.ask("store", name="held", objects=stored)
        for number, ending in enumerate((signal.SIGTERM, signal.SIGKILL)):
            children = Path(f"/proc/{held.pid}/task/{held.pid}/children").read_text().split()
            os.kill(int(children[0]), ending)
            loaded = engine.ask("load", name="held", objects=list(zip(keys, sizes, strict=True)))
            assert loaded["digests"] == digests(sizes, 500)
            assert engine.ask("store", name="held", objects=[(key(510 + number), MIB, 510)])
            assert is_untroubled(engine, "held")
        held.terminate()


def test_a_plain_restart_costs_at_most_a_miss(engine: EngineProcess, server: ServerProcess) -> None:
    """Connections are refused for a second or more; the adapter's client tries again for some seconds, then says miss."""
    engine.ask("open", name="adapter", settings=settings_of(server, f"{ORDINARY}.{DOMAIN}"))
    assert engine.ask("store", name="adapter", objects=[(key(600), MIB, 600)])
    server.terminate()
    again = threading.Thread(target=server.start)
    again.start()
    try:
        meanwhile = engine.ask("load", name="adapter", objects=[(key(600), MIB)])["digests"]
    finally:
        again.join()
    assert meanwhile[0] in {None, digest_of(MIB, 600)}
    assert engine.ask("load", name="adapter", objects=[(key(600), MIB)])["digests"] == [digest_of(MIB, 600)]
    assert is_untroubled(engine)
