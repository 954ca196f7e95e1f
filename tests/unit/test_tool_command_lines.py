"""Tools look at their arguments before they start, and tell in one line what they cannot go on with."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import command_line
import pytest
from trace_blocks import read_trace

from kvobj.errors import UnavailableError

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (command_line.zero_or_more, {"0": 0, "12": 12}, ["-1", "1.5", "x", ""]),
        (command_line.one_or_more, {"1": 1}, ["0", "-1"]),
        (command_line.amount, {"0": 0.0, "1e3": 1000.0}, ["-0.1", "inf", "nan", "x"]),
        (command_line.above_zero, {"0.5": 0.5}, ["0", "-1", "nan"]),
        (command_line.share, {"0": 0.0, "1": 1.0}, ["1.1", "-1", "nan"]),
        (command_line.size_bytes, {"512MiB": 2**29, "4 GiB": 2**32, "17": 17}, ["4 XB", "1..2", "-1", "inf GiB", ""]),
        (command_line.codec_name, {"x3": "x3", "eq:83/2": "eq:83/2"}, ["x9", ""]),
        (command_line.one_of("get", "put"), {"put": "put"}, ["head", ""]),
        (command_line.listed(command_line.one_or_more), {"1,8": (1, 8), "4": (4,)}, ["", "x", "1,", "1;8", "0"]),
        (command_line.listed_or_none(command_line.one_or_more), {"1,8": (1, 8), "": ()}, [",", "x", "1,"]),
        (
            command_line.http_address,
            {"http://h:18871": ("h", 18871), "http://[::1]/": ("::1", 80)},
            ["x", "", "https://h", "http://", "http://h:x", "http://h:0", "http://h:65536", "http://[::1"],
        ),
    ],
)
def test_values_are_taken_or_refused_in_words(
    kind: Callable[[str], object], right: dict[str, object], wrong: list[str]
) -> None:
    assert {text: kind(text) for text in right} == right
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not|is none of|unknown tensor codec"):
            kind(text)


def test_paths_are_looked_at_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "there"
    file.touch()
    assert command_line.existing_file(str(file)) == file
    assert command_line.existing_folder(str(tmp_path)) == tmp_path
    assert command_line.output_file(str(tmp_path / "new.json")) == tmp_path / "new.json"
    for check, path in (
        (command_line.existing_file, tmp_path),
        (command_line.existing_file, tmp_path / "absent"),
        (command_line.existing_folder, file),
        (command_line.output_file, tmp_path / "absent" / "new.json"),
        (command_line.output_file, tmp_path),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=str(path)):
            check(str(path))


def test_help_states_every_default_once() -> None:
    parser = command_line.Parser("What it does.")
    parser.add_argument("--rounds", type=command_line.one_or_more, default=5)
    parser.add_argument("--seed", default=1, help="of 100 %% of the cases")
    parser.add_argument("--only", nargs="+", default=("get", "put"), help="which ones")
    parser.add_argument("--directory", help="default: a temporary one")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--hidden", default="x", help=argparse.SUPPRESS)
    lines = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    assert lines[lines.index("options:") + 1 :] == [
        "-h, --help show this help message and exit",
        "--rounds ROUNDS default: 5",
        "--seed SEED of 100 % of the cases (default: 1)",
        "--only ONLY [ONLY ...]",
        "which ones (default: get put)",
        "--directory DIRECTORY",
        "default: a temporary one",
        "--quiet no progress bar",
    ]


@pytest.mark.parametrize(
    ("problem", "status", "told"),
    [
        (command_line.ToolError("no credentials"), 2, "no credentials"),
        (FileNotFoundError(2, "No such file or directory", "absent"), 2, "absent: No such file or directory"),
        (UnavailableError("no answer from the server", endpoint="x:1"), 1, "no answer from the server endpoint=x:1"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_what_goes_wrong_outside_is_told_in_one_line(
    problem: BaseException, status: int, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise problem

    monkeypatch.setattr(sys, "argv", ["tools/example.py"])
    with pytest.raises(SystemExit) as ending:
        command_line.run_tool(fail)
    assert (ending.value.code, capsys.readouterr().err) == (status, f"example.py: {told}\n")


def test_a_tools_own_mistake_is_not_hidden() -> None:
    with pytest.raises(OSError, match="refused"):
        command_line.run_tool(lambda: (_ for _ in ()).throw(ConnectionRefusedError(111, "refused")))
    with pytest.raises(SystemExit) as ending:
        command_line.run_tool(lambda: 1)
    assert ending.value.code == 1


@pytest.mark.parametrize("content", [b"", b"# a text\n", b"{}\n", b"[1]\n", b"\xff\n"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_what_is_no_trace_is_told_as_such(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(content)
    with pytest.raises(command_line.ToolError, match=r"trace\.jsonl"):
        list(read_trace(path))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["bench_http.py", "--sizes-mib", "1,x"], "argument --sizes-mib: 'x' is not a whole number above 0"),
        (["bench_http.py", "--connections", ","], "argument --connections: '' is not a whole number above 0"),
        (["bench_http.py", "--connections", ""], "argument --connections: '' is not a list"),
        (["bench_http.py", "--verbs", ""], "argument --verbs: '' is not a list"),
        (["bench_s3.py", "--radosgw", "x"], "argument --radosgw: 'x' is not an http URL"),
        (["bench_http.py", "--verbs", "get,head"], "argument --verbs: 'head' is none of get, put"),
        (["simulate_policy.py", "--percents", "1,x"], "argument --percents: 'x' is not a number above 0"),
        (["fuzz_parsers.py", "--target", "nobody"], "no such target: nobody"),
    ],
)
def test_what_a_tool_cannot_take_is_refused_in_words(wrong: list[str], told: str) -> None:
    tool, *arguments = wrong
    command = [sys.executable, str(TOOLS / tool), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, told in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_a_tool_ends_with_what_it_was_told(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("no trace\n")
    command = [sys.executable, str(TOOLS / "simulate_policy.py"), "--quiet", "--trace"]
    done = subprocess.run([*command, str(tmp_path / "trace.jsonl")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    done = subprocess.run([*command, str(tmp_path / "absent")], capture_output=True, text=True, check=False)
    assert (done.returncode, "absent: no such file" in done.stderr) == (2, True)


def test_a_tool_that_is_told_to_end_leaves_its_blocks() -> None:
    """What it started, a server in its directory, would be left behind."""
    text = f"""
import sys, time
sys.path.insert(0, {str(TOOLS)!r})
from contextlib import contextmanager
from command_line import run_tool

@contextmanager
def started():
    try:
        print("started", flush=True)
        yield
    finally:
        print("ended", flush=True)

def main():
    with started():
        sys.stdin.read()

run_tool(main)
"""
    for number in (signal.SIGTERM, signal.SIGHUP):
        with subprocess.Popen(
            [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as tool:
            assert tool.stdout is not None
            assert tool.stdout.readline() == "started\n"
            tool.send_signal(number)
            assert tool.wait(20) == 128 + number
            assert tool.stdout.read() == "ended\n"
