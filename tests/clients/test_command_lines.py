"""The aws CLI, rclone, s3cmd and s4cmd, as programs, against a real server: put, get, range, list, multipart, delete."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from client_suite import body_of, client_binary, client_server
from module_paths import ModulePaths
from server_process import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server_process import ServerProcess

BUCKET = "command-lines"


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with client_server(module_paths.mktemp("command-lines")) as running:
        with running.raw() as raw:
            assert raw.request("PUT", f"/{BUCKET}").status == 200
        yield running


def run(command: list[str], server: ServerProcess, home: Path, *, is_refused: bool = False) -> str:
    credentials = server.credentials()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "AWS_ACCESS_KEY_ID": credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
        "AWS_DEFAULT_REGION": credentials.region,
        "AWS_EC2_METADATA_DISABLED": "true",
        "S3_ACCESS_KEY": credentials.access_key,
        "S3_SECRET_KEY": credentials.secret_key,
        "RCLONE_CONFIG": str(home / "rclone.conf"),
        "RCLONE_CONFIG_KVOBJ_TYPE": "s3",
        "RCLONE_CONFIG_KVOBJ_PROVIDER": "Other",
        "RCLONE_CONFIG_KVOBJ_ENV_AUTH": "true",
        "RCLONE_CONFIG_KVOBJ_ENDPOINT": server.endpoint,
        "RCLONE_CONFIG_KVOBJ_REGION": credentials.region,
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode != 0) == is_refused, f"{command}\n{done.stdout}{done.stderr}\n{server.log_tail(10)}"
    return done.stdout if not is_refused else done.stderr


class TestAwsCommandLine:
    def aws(self, server: ServerProcess, home: Path, *arguments: str, is_refused: bool = False) -> str:
        command = [str(client_binary("aws")), "--endpoint-url", server.endpoint, *arguments]
        return run(command, server, home, is_refused=is_refused)

    def test_a_folder_goes_up_is_listed_and_comes_down(self, server: ServerProcess, tmp_path: Path) -> None:
        tree = {"a.bin": 10, "sub/b ü.bin": 70_000, "sub/deep/c.bin": 9 * MIB}  # the last one in parts
        for name, size in tree.items():
            (tmp_path / "up" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "up" / name).write_bytes(body_of(size))
        self.aws(server, tmp_path, "s3", "cp", "--recursive", "--no-progress", "up", f"s3://{BUCKET}/aws/")
        listing = self.aws(server, tmp_path, "s3", "ls", "--recursive", f"s3://{BUCKET}/aws/")
        assert [line.split(None, 3)[3] for line in listing.splitlines()] == [f"aws/{name}" for name in sorted(tree)]
        self.aws(server, tmp_path, "s3", "sync", "--no-progress", f"s3://{BUCKET}/aws/", "down")
        for name, size in tree.items():
            assert (tmp_path / "down" / name).read_bytes() == body_of(size)
        self.aws(server, tmp_path, "s3", "rm", "--recursive", f"s3://{BUCKET}/aws/")
        listing = self.aws(server, tmp_path, "s3api", "list-objects-v2", "--bucket", BUCKET, "--prefix", "aws/")
        assert "Contents" not in listing

    def test_no_connection_stalls_behind_an_empty_file(self, server: ServerProcess, tmp_path: Path) -> None:
        (tmp_path / ".aws").mkdir()
        settings = "[default]\nmax_attempts = 1\ncli_read_timeout = 5\ns3 =\n  max_concurrent_requests = 1\n"
        (tmp_path / ".aws" / "config").write_text(settings)  # one connection, and who is not answered in time fails
        tree = {f"{number}": 0 if number % 2 else 10 for number in range(6)}
        make_tree(tmp_path / "up", tree)
        self.aws(server, tmp_path, "s3", "cp", "--recursive", "--no-progress", "up", f"s3://{BUCKET}/empty/")
        listing = self.aws(server, tmp_path, "s3", "ls", "--recursive", f"s3://{BUCKET}/empty/")
        assert [int(line.split()[2]) for line in listing.splitlines()] == list(tree.values())

    def test_a_range_is_read_and_its_end_respected(self, server: ServerProcess, tmp_path: Path) -> None:
        body = body_of(500_000)
        (tmp_path / "body").write_bytes(body)
        place = ("--bucket", BUCKET, "--key", "aws-ranged")
        self.aws(server, tmp_path, "s3api", "put-object", *place, "--body", "body", "--metadata", "colour=blue")
        self.aws(server, tmp_path, "s3api", "get-object", *place, "--range", "bytes=262140-262150", "piece")
        assert (tmp_path / "piece").read_bytes() == body[262_140:262_151]
        head = json.loads(self.aws(server, tmp_path, "s3api", "head-object", *place))
        assert (head["ContentLength"], head["Metadata"]) == (500_000, {"colour": "blue"})
        self.aws(server, tmp_path, "s3api", "delete-object", *place)
        assert "404" in self.aws(server, tmp_path, "s3api", "head-object", *place, is_refused=True)

    def test_buckets_are_made_and_removed(self, server: ServerProcess, tmp_path: Path) -> None:
        self.aws(server, tmp_path, "s3", "mb", "s3://aws-made")
        assert "aws-made" in self.aws(server, tmp_path, "s3", "ls")
        self.aws(server, tmp_path, "s3", "rb", "s3://aws-made")


class TestRclone:
    def rclone(self, server: ServerProcess, home: Path, *arguments: str, is_refused: bool = False) -> str:
        command = [str(client_binary("rclone")), "--retries", "1", "--low-level-retries", "1", *arguments]
        return run(command, server, home, is_refused=is_refused)

    def test_a_folder_goes_up_is_checked_and_comes_down(self, server: ServerProcess, tmp_path: Path) -> None:
        tree = {"a.bin": 10, "sub/b ü+%20.bin": 70_000, "sub/deep/c.bin": 11 * MIB, "empty": 0}
        for name, size in tree.items():
            (tmp_path / "up" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "up" / name).write_bytes(body_of(size))
        parts = ("--s3-upload-cutoff", "5Mi", "--s3-chunk-size", "5Mi")
        self.rclone(server, tmp_path, "copy", *parts, "up", f"kvobj:{BUCKET}/rclone")
        self.rclone(server, tmp_path, "check", "--download", "up", f"kvobj:{BUCKET}/rclone")
        listed = json.loads(self.rclone(server, tmp_path, "lsjson", "-R", "--files-only", f"kvobj:{BUCKET}/rclone"))
        assert {entry["Path"]: entry["Size"] for entry in listed} == tree
        self.rclone(server, tmp_path, "copy", f"kvobj:{BUCKET}/rclone", "down")
        for name, size in tree.items():
            assert (tmp_path / "down" / name).read_bytes() == body_of(size)
        self.rclone(server, tmp_path, "delete", f"kvobj:{BUCKET}/rclone")
        assert json.loads(self.rclone(server, tmp_path, "lsjson", "-R", f"kvobj:{BUCKET}/rclone") or "[]") == []

    def test_a_range_of_an_object_is_read(self, server: ServerProcess, tmp_path: Path) -> None:
        body = b"0123456789" * 30_000
        (tmp_path / "digits").write_bytes(body)
        self.rclone(server, tmp_path, "copyto", "digits", f"kvobj:{BUCKET}/digits")
        piece = self.rclone(server, tmp_path, "cat", "--offset", "262140", "--count", "13", f"kvobj:{BUCKET}/digits")
        assert piece == body[262_140:262_153].decode()

    def test_a_chunk_bucket_takes_files_too(self, server: ServerProcess, tmp_path: Path) -> None:
        (tmp_path / "chunk").write_bytes(body_of(6 * MIB))
        self.rclone(server, tmp_path, "copyto", "chunk", "kvobj:chunks/rclone-chunk")
        self.rclone(server, tmp_path, "copyto", "kvobj:chunks/rclone-chunk", "back")
        assert (tmp_path / "back").read_bytes() == body_of(6 * MIB)

    def test_buckets_are_made_and_removed(self, server: ServerProcess, tmp_path: Path) -> None:
        self.rclone(server, tmp_path, "mkdir", "kvobj:rclone-made")
        self.rclone(server, tmp_path, "rmdir", "kvobj:rclone-made")
        assert "rclone-made" not in self.rclone(server, tmp_path, "lsd", "kvobj:")


def make_tree(place: Path, tree: dict[str, int]) -> None:
    for number, (name, size) in enumerate(tree.items()):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(body_of(size, number))


def tree_of(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


class TestS3cmd:
    def s3cmd(self, server: ServerProcess, home: Path, *arguments: str, is_refused: bool = False) -> str:
        host = f"{server.host}:{server.port}"
        options = ("--host", host, "--host-bucket", host, "--no-ssl", "--no-progress", "--region", "us-east-1")
        return run([str(client_binary("s3cmd")), *options, *arguments], server, home, is_refused=is_refused)

    def test_a_folder_is_synchronised_up_and_down_and_removed(self, server: ServerProcess, tmp_path: Path) -> None:
        make_tree(tmp_path / "up", {"a ü+%20.bin": 70_000, "empty": 0, "sub/large.bin": 11 * MIB + 7})
        place = f"s3://{BUCKET}/s3cmd/"
        self.s3cmd(server, tmp_path, "sync", "--multipart-chunk-size-mb=5", "up/", place)
        assert "Done" not in self.s3cmd(server, tmp_path, "sync", "up/", place)  # all is there, by size and MD5
        self.s3cmd(server, tmp_path, "sync", place, "down/")
        assert tree_of(tmp_path / "down") == tree_of(tmp_path / "up")
        assert str(11 * MIB + 70_007) in self.s3cmd(server, tmp_path, "du", place)
        self.s3cmd(server, tmp_path, "del", "--recursive", "--force", place)
        assert self.s3cmd(server, tmp_path, "ls", "--recursive", place) == ""

    def test_objects_are_copied_changed_and_described(self, server: ServerProcess, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(body_of(1000))
        first, second = f"s3://{BUCKET}/s3cmd-first", f"s3://{BUCKET}/s3cmd second"
        self.s3cmd(server, tmp_path, "put", "file", first)
        self.s3cmd(server, tmp_path, "mv", first, second)
        self.s3cmd(server, tmp_path, "modify", "--add-header=x-amz-meta-colour:blue", "--mime-type=text/x-odd", second)
        told = self.s3cmd(server, tmp_path, "info", second)
        assert "text/x-odd" in told
        assert "x-amz-meta-colour: blue" in told
        assert self.s3cmd(server, tmp_path, "get", first, "gone", is_refused=True)
        self.s3cmd(server, tmp_path, "get", second, "back")
        assert (tmp_path / "back").read_bytes() == body_of(1000)
        self.s3cmd(server, tmp_path, "setacl", "--acl-public", second)
        assert "READ" in self.s3cmd(server, tmp_path, "info", second)

    def test_buckets_are_made_described_and_removed(self, server: ServerProcess, tmp_path: Path) -> None:
        self.s3cmd(server, tmp_path, "mb", "s3://s3cmd-made")
        assert "Location:  us-east-1" in self.s3cmd(server, tmp_path, "info", "s3://s3cmd-made")
        assert "s3://s3cmd-made" in self.s3cmd(server, tmp_path, "ls")
        self.s3cmd(server, tmp_path, "rb", "s3://s3cmd-made")


class TestS4cmd:
    def test_a_folder_goes_up_is_listed_and_comes_down(self, server: ServerProcess, tmp_path: Path) -> None:
        make_tree(tmp_path / "up", {"a ü.bin": 70_000, "empty": 0, "sub/b.bin": 12_345})
        program = client_binary("s4cmd.py")
        command = [str(program.with_name("python")), "-W", "ignore", str(program), "--endpoint-url", server.endpoint]
        run([*command, "sync", "up/", f"s3://{BUCKET}/s4cmd/"], server, tmp_path)
        listing = run([*command, "ls", "--recursive", f"s3://{BUCKET}/s4cmd/"], server, tmp_path)
        assert [line.split(None, 3)[3] for line in listing.splitlines()] == [
            f"s3://{BUCKET}/s4cmd/up/{name}" for name in ("a ü.bin", "empty", "sub/b.bin")
        ]
        run([*command, "get", "--recursive", f"s3://{BUCKET}/s4cmd/", "down/"], server, tmp_path)
        assert tree_of(tmp_path / "down" / "up") == tree_of(tmp_path / "up")
        run([*command, "del", "--recursive", f"s3://{BUCKET}/s4cmd/"], server, tmp_path)
        assert run([*command, "ls", "--recursive", f"s3://{BUCKET}/s4cmd/"], server, tmp_path) == ""
