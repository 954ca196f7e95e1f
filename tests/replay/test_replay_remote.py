"""The replay against a node with a remote: the tool's three parts on a piece of a public trace, another kvobj being the remote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from remote_nodes import Gateway
from remote_servers import RemoteStore
from replay_remote import Runner, make_plan, markdown, notes_of, parse_arguments, run_parts
from rich.console import Console
from server_process import ServerProcess

TRACE = Path(__file__).with_name("mooncake_conversation.jsonl.zst")
SMALL = (
    *("--trace", str(TRACE), "--requests", "30", "--target-bytes", "120 MiB"),
    *("--dram", "64 MiB", "--nvme", "64 MiB"),
)

Rows = dict[str, dict[str, Any]]


@pytest.fixture
def remote(kvobj_remote_server: ServerProcess, kvobj_remote: RemoteStore) -> Gateway:
    return Gateway(kvobj_remote_server, nodes=kvobj_remote.bucket)


def replayed(remote: Gateway, directory: Path, *options: str) -> tuple[Rows, dict[str, Any]]:
    arguments = parse_arguments([*SMALL, *options])
    runner = Runner(make_plan(arguments), Console(stderr=True), is_quiet=True)
    more = run_parts(remote, directory, runner, arguments)
    for name, row in runner.rows.items():
        assert row["wrong_blocks"] == 0, name
        assert row["errors"] == {}, name
    return runner.rows, more


def test_what_nvme_has_no_room_for_is_read_from_the_remote_also_where_that_misbehaves(
    remote: Gateway, tmp_path: Path
) -> None:
    rows, more = replayed(remote, tmp_path, "--only", "faulty", "--rate", "0.05")
    row = rows["faulty"]
    assert row["requests"] == 30
    assert row["remote"]["sent_bytes"] > 10_000_000, "nvme was too small: the rest went up"
    assert row["token_hit_ratio"] > 0.9 * row["infinite_cache_token_hit_ratio"], "what left nvme was found all the same"
    assert sum(row["token_hit_ratio_by_tier"].values()) == pytest.approx(row["token_hit_ratio"])
    assert sum(sum(counts.values()) for counts in more["proxy"]["injected"].values()) > 5
    assert "| faulty | 30, " in markdown("title", rows, notes_of(more))


def test_after_the_loss_of_the_node_the_rest_of_the_replay_hits_what_was_shared(
    remote: Gateway, tmp_path: Path
) -> None:
    rows, more = replayed(remote, tmp_path, "--only", "lost", "--flushed", "--nvme", "256 MiB")
    after = rows["after the loss"]
    assert more["rebuild"]["missing_objects"] == 0
    assert more["rebuild"]["lineage"] == 2
    assert more["rebuild"]["objects"] > 100
    assert after["token_hit_ratio_by_tier"]["remote"] > 0, "found by its name and read from the remote"
    assert after["token_hit_ratio"] > after["infinite_cache_token_hit_ratio"], "more than an empty store could have"
