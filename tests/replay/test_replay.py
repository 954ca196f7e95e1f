"""The replay tool on a piece of a public trace, against a real server whose dram is smaller than what is written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from module_paths import ModulePaths
from server_process import MIB, REPOSITORY, ServerProcess, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

# The first 500 requests of Mooncake's conversation trace (FAST'25 release, Apache-2.0): 14,162 accesses, 11,879 blocks.
TRACE = Path(__file__).with_name("mooncake_conversation_500.jsonl.zst")


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    settings = ServerSettings(dram_bytes=48 * MIB, nvme_bytes=768 * MIB)
    with ServerProcess(module_paths.mktemp("replay"), settings) as running:
        yield running


def replay(server: ServerProcess, directory: Path, *options: str, trace: Path = TRACE) -> dict[str, Any]:
    result = directory / "result.json"
    command = [
        sys.executable,
        str(REPOSITORY / "tools" / "replay_trace.py"),
        *("--trace", str(trace)),
        *("--endpoint", server.endpoint),
        *("--data", str(server.data)),
        *("--json", str(result)),
        "--quiet",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr + server.log_tail()
    summary: dict[str, Any] = json.loads(result.read_text())
    return summary


def test_a_trace_is_replayed_with_evictions_and_every_byte_is_right(server: ServerProcess, tmp_path: Path) -> None:
    summary = replay(server, tmp_path, "--target-bytes", "300 MiB")
    assert summary["requests"] == 500
    assert summary["blocks"] >= 5_000
    assert summary["wrong_blocks"] == 0
    assert summary["errors"] == {}
    assert summary["blocks_written"] == summary["different_blocks"], "each block once: none was lost, none replaced"
    assert summary["bytes_written"] > 3 * server.settings.dram_bytes, "dram cannot hold what was written: it must evict"
    assert server.tier("dram")["used_bytes"] <= server.settings.dram_bytes


def test_a_second_replay_finds_every_block_in_some_tier(server: ServerProcess, tmp_path: Path) -> None:
    options = ("--bucket", "again", "--requests", "50", "--bytes-per-token", "160", "--seed", "2")
    first = replay(server, tmp_path, *options)
    again = replay(server, tmp_path, *options)
    assert first["blocks_written"] == first["different_blocks"]
    assert first["bytes_written"] > 1.5 * server.settings.dram_bytes
    assert again["block_hit_ratio"] == 1.0
    assert again["blocks_written"] == 0
    assert again["wrong_blocks"] == 0


def test_an_ordinary_bucket_takes_the_same_replay(server: ServerProcess, tmp_path: Path) -> None:
    options = ("--requests", "40", "--bucket-kind", "ordinary", "--target-bytes", "20 MiB")
    summary = replay(server, tmp_path, *options)
    assert summary["wrong_blocks"] == 0
    assert summary["errors"] == {}
    assert summary["blocks_written"] >= summary["different_blocks"]


def match_replay(directory: Path, *options: str) -> dict[str, Any]:
    """A replay through ?match against a small server of its own, with short times."""
    times = {"grace": '"1 s"', "sweep_interval": '"1 s"', "lease_ttl": '"1 s"'}
    sizes = ServerSettings(dram_bytes=64 * MIB, nvme_bytes=64 * MIB, sections={"gc": times})
    given = ("--api", "match", "--ttl", "1", "--grace", "1", "--sweep", "1", "--crash-share", "0.05")
    with ServerProcess(directory / "server", sizes) as server:
        return replay(server, directory, *given, "--admin", f"http://127.0.0.1:{server.admin_port}", *options)


def test_holders_that_pin_and_crash_read_right_bytes_while_the_collector_keeps_a_small_store_full(
    tmp_path: Path,
) -> None:
    summary = match_replay(tmp_path, "--target-bytes", "130 MiB")
    assert summary["requests"] == 500
    assert summary["wrong_blocks"] == 0
    assert summary["pinned_unreadable"] == 0
    assert summary["pinned_reads"] > 1_000
    assert summary["errors"] == {}
    assert summary["claimed_chunks"] > 1_000, "the store was full: the collector made room"
    assert summary["crashes"] > 10
    assert summary["sessions_at_crash"] >= 1, "pins of dead holders stood when everything was removed"
    assert summary["garbage_seconds"] <= summary["garbage_seconds_max"]
    assert summary["token_hit_ratio"] > 0.8 * summary["lru_token_hit_ratio"]


def test_foreign_keys_with_parents_are_replayed_alike(tmp_path: Path) -> None:
    summary = match_replay(tmp_path, "--ids", "foreign", "--requests", "100", "--bytes-per-token", "16")
    assert summary["wrong_blocks"] == 0
    assert summary["pinned_unreadable"] == 0
    assert summary["errors"] == {}
    assert summary["block_hit_ratio"] > 0
    assert summary["garbage_seconds"] <= summary["garbage_seconds_max"]


def test_a_wrong_byte_in_the_store_is_noticed(server: ServerProcess, tmp_path: Path) -> None:
    trace = tmp_path / "one_block.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7]}) + "\n")
    options = ("--bucket", "tampered", "--bucket-kind", "ordinary", "--bytes-per-token", "64")
    replay(server, tmp_path, *options, trace=trace)
    with server.raw() as raw:
        listing = raw.request("GET", "/tampered", query={"list-type": "2"}, payload=None).body.decode()
        key = listing.partition("<Key>")[2].partition("</Key>")[0]
        body = bytearray(raw.request("GET", f"/tampered/{key}").body)
        assert len(body) == 64 * 512
        body[20_000] ^= 1
        assert raw.request("PUT", f"/tampered/{key}", bytes(body)).status == 200
    with pytest.raises(AssertionError, match="wrong blocks"):
        replay(server, tmp_path, *options, trace=trace)
