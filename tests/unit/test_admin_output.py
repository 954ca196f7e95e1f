"""What others chose (keys, names, messages of a server) reaches the terminal as text, whatever it is."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console

from kvobj.admin import render
from kvobj.admin.flush import flush
from kvobj.admin.namespaces import export
from kvobj.admin.output import Output, visible
from kvobj.admin.recall import recall
from kvobj.admin.verify import verify
from kvobj.client import AdminClient
from kvobj.errors import UnavailableError

HOSTILE: Final = "a\x1b[2J\n\r\x07\x7f\x9b1m\u202e\u2028[red]\\[bold][/] :cat:"
SHOWN: Final = r"a\x1b[2J\n\r\x07\x7f\x9b1m\u202e\u2028[red]\[bold][/] :cat:"
COUNTS: Final[dict[str, object]] = {f"x{HOSTILE}": 1, "odd": HOSTILE}


def row(*names: str, **others: object) -> dict[str, object]:
    """A document of a server that means no good: every name has the same text."""
    return {**dict.fromkeys(names, HOSTILE), **others}


STATUS: Final = row(
    "version",
    "store_id",
    "uptime_seconds",
    "receive_mode",
    tiers=[
        row("name", "capacity_bytes", "blobs", "hit_ratio", "mode", "transfers", "location", is_home=True),
        row("name", codecs=[row("codec", "blobs", "plain_bytes", "ratio")]),
    ],
    remote=row(
        "endpoint", "bucket", "prefix", "state", "reason", "since_ms", "breaker", "clock_skew_seconds", "claim",
        "claim_reason", "lineage", "uploads_held_by", "manifests_problem",
        capabilities=COUNTS, queue=COUNTS, manifests=COUNTS, requests=COUNTS,
    ),
    upstreams=[
        row(
            "bucket", "endpoint", "remote_bucket", "state", "reason", "last_error", "last_error_ms",
            namespaces=COUNTS, chunks=COUNTS, requests=COUNTS,
        )
    ],
    arena=COUNTS,
    gpu=COUNTS,
    unfinished=COUNTS,
    workers=[row("pid", "requests", "connections", "cpu_seconds", "restarts", "last_end")],
    notes=[HOSTILE],
)  # fmt: skip
INSPECTION: Final = row(
    "bucket", "key", "size_bytes", "etag", "modified_ms", "durability", "state", "owner", "sequence", "digest",
    headers=COUNTS, metadata=COUNTS, checksums=COUNTS,
    blobs=[
        row("blob_id", "plain_bytes", "frame_bytes", "codec", "digest", tiers=[HOSTILE, HOSTILE]),
        row("blob_id", tiers=["dram"], frame=row("codec", "blocks", "digest")),
    ],
)  # fmt: skip
PLAN: Final = row(
    "home_used_bytes", "marked", "waiting_for_pins", chunks=2, victims=[row("reason", "bucket", "key", "unused_seconds")]
)  # fmt: skip
Printing = Callable[[Console], None]
PRINTINGS: Final[dict[str, Printing]] = {
    "status": lambda console: render.print_status(console, STATUS),
    "buckets": lambda console: render.print_buckets(
        console, [row("name", "kind", "durability", "remote", "codec", "owner")]
    ),
    "objects": lambda console: render.print_objects(console, [row("key", "durability", "modified_ms", "size_bytes")]),
    "inspection": lambda console: render.print_inspection(console, INSPECTION),
    "gc plan": lambda console: render.print_gc_plan(console, PLAN),
    "gc report": lambda console: render.print_gc_report(console, row("condemned", "claimed", "rescued")),
    "users": lambda console: render.print_users(console, [row("id", "display_name", "access_key")]),
    "namespaces": lambda console: render.print_namespaces(
        console, [row("name", "ids", "chunk_tokens", "chunks", "fingerprint")]
    ),
    "values": lambda console: render.print_values(console, HOSTILE, COUNTS),
}


def assert_is_plain_text(out: str) -> None:
    assert SHOWN in out
    assert all(line.isprintable() for line in out.split("\n"))


@pytest.mark.parametrize("what", PRINTINGS)
def test_whatever_a_server_says_is_shown_as_text(what: str) -> None:
    out = io.StringIO()
    PRINTINGS[what](Console(file=out, width=5000))
    assert_is_plain_text(out.getvalue())


def test_numbers_that_no_clock_or_store_has_are_shown_as_unknown() -> None:
    assert [render.size_text(value) for value in (float("nan"), float("-inf"), 10**30)] == ["-", "-", "-"]
    assert [render.time_text(value) for value in (10**18, -(10**18))] == ["-", "-"]
    assert [render.duration_text(value) for value in (float("inf"), float("nan"))] == ["-", "-"]


class HostileClient(AdminClient):
    """A client whose server ends everything at once, and says so in its own way."""

    def __init__(self) -> None:
        """Without a connection: no answer is asked for."""

    def start_verification(self, bucket: str | None = None) -> dict[str, object]:
        problems = [row("bucket", "key", "problem")]
        return row("state", "failure", bucket=bucket, problems=problems, problem_count=1)

    def start_recall(self, bucket: str, **_conditions: object) -> dict[str, object]:
        return row("state", "failure", "chunks", bucket=bucket)

    def flush(self, *, local: bool = False, timeout_seconds: float | None = None) -> dict[str, object]:
        del local, timeout_seconds
        return row("held_by", left_to_upload=1, is_done=False)


COMMANDS: Final[dict[str, Callable[[Output], int]]] = {
    "verify": lambda output: verify(HostileClient(), output, bucket=None, wait=lambda _: None),
    "recall": lambda output: recall(
        HostileClient(), output, bucket="b", namespace=None, writer=None, from_ms=None, to_ms=None, dry_run=False,
        wait=lambda _: None,
    ),
    "flush": lambda output: flush(HostileClient(), output, local=False, timeout_seconds=0, monotonic=lambda: 1.0),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_reports_is_shown_as_text(command: str) -> None:
    out, errors = io.StringIO(), io.StringIO()
    output = Output(out, errors, Console(file=out, width=5000), is_json=False)
    assert COMMANDS[command](output) == 1
    assert_is_plain_text(out.getvalue() + errors.getvalue())


class OddClient(HostileClient):
    """A client whose server is none of kvobj's: its documents lack what they should have."""

    def start_verification(self, bucket: str | None = None) -> dict[str, object]:
        del bucket
        return {"problems": [3, {}, {"bucket": "b"}], "checked_bytes": float("nan")}

    def export_namespace(self, bucket: str, name: str) -> dict[str, object]:
        return {"name": name, "bucket": bucket, "format": "another", "key": "k"}


def test_what_an_answer_lacks_is_shown_as_unknown_or_refused(tmp_path: Path) -> None:
    out, errors = io.StringIO(), io.StringIO()
    output = Output(out, errors, Console(file=out, width=5000), is_json=False)
    assert verify(OddClient(), output, bucket=None, wait=lambda _: None) == 1
    assert out.getvalue().splitlines() == ["None/None: None", "b/None: None", "None; 0 objects, - verified, 0 wrong"]
    with pytest.raises(UnavailableError, match="no namespace"):
        export(OddClient(), output, "b", "n", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_json_stays_what_it_is_and_moves_no_cursor() -> None:
    for value, is_escaped in (("é[red]", False), (HOSTILE, True)):
        out = io.StringIO()
        Output(out, io.StringIO(), Console(file=out), is_json=True).show({"key": value}, lambda _: None)
        written = out.getvalue()
        assert json.loads(written) == {"key": value}
        assert written.removesuffix("\n").isprintable()
        assert written.isascii() is is_escaped


def test_what_is_printable_is_shown_as_it_is() -> None:
    assert visible("a b é 😀 [x]") == "a b é 😀 [x]"
    assert visible("\U000e0001") == r"\U000e0001"
