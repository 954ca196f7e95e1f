"""The data directory: identity, lock, format version, credentials."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from kvobj.config import RootCredentials
from kvobj.data_directory import (
    DataDirectory,
    default_nvme_capacity_bytes,
    read_admin_endpoint,
    read_credentials,
)
from kvobj.errors import ConfigurationError, CorruptionError, UnavailableError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_identity_outlives_the_process(path: Path) -> None:
    with DataDirectory.open(path) as first:
        identity = first.store_id, first.store_key
    with DataDirectory.open(path) as second:
        assert (second.store_id, second.store_key) == identity
    assert (len(identity[0]), len(identity[1])) == (16, 32)


def test_nothing_in_it_is_open_to_others(path: Path) -> None:
    with DataDirectory.open(path) as data:
        data.root_credentials()
        data.write_endpoints(s3="http://127.0.0.1:1", admin="http://127.0.0.1:2")
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}


def test_a_second_holder_is_refused_and_told_who_holds_it(path: Path) -> None:
    with DataDirectory.open(path), pytest.raises(UnavailableError, match=f"in use.*pid={os.getpid()}"):
        DataDirectory.open(path)
    DataDirectory.open(path).close()


def test_a_second_holder_is_refused_though_the_locks_file_was_removed(path: Path) -> None:
    with DataDirectory.open(path):
        (path / "lock").unlink()
        with pytest.raises(UnavailableError, match=r"in use.*pid=unknown"):
            DataDirectory.open(path)
        assert not (path / "lock").exists()
    DataDirectory.open(path).close()


def test_a_holder_of_the_file_alone_is_respected(path: Path) -> None:
    DataDirectory.open(path).close()
    with (path / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as where directories cannot be locked
        with pytest.raises(UnavailableError, match=f"in use.*pid={os.getpid()}"):
            DataDirectory.open(path)
    DataDirectory.open(path).close()


def test_a_child_that_outlives_the_holder_does_not_hold_it(path: Path) -> None:
    with DataDirectory.open(path):
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        )
        assert child.stdout is not None
        child.stdout.readline()  # it has begun, and so has let go of what it does not inherit
    try:
        DataDirectory.open(path).close()
        assert child.poll() is None
    finally:
        child.communicate(b"\n")


def test_the_lock_dies_with_its_process(path: Path) -> None:
    script = (
        "import sys, os, pathlib; from kvobj.data_directory import DataDirectory\n"
        "DataDirectory.open(pathlib.Path(sys.argv[1])); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == 9
    DataDirectory.open(path).close()


def test_a_newer_format_is_refused_by_name(path: Path) -> None:
    DataDirectory.open(path).close()
    (path / "FORMAT").write_text('version = 2\nstore_id = "00"\n')
    with pytest.raises(ConfigurationError, match="format 2 is newer than format 1"):
        DataDirectory.open(path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "version = 1\n",
        'version = 0\nstore_id = "00"',
        'version = 1\nstore_id = "zz"',
        "\x00",
        f'version = 1\nstore_id = "{"00" * 16}"\nstore_key_tag = "zz"\n',
        f'version = 1\nstore_id = "{"00" * 16}"\nstore_key_tag = 1\n',
    ],
)
def test_a_damaged_format_file_is_corruption(path: Path, content: str) -> None:
    DataDirectory.open(path).close()
    (path / "FORMAT").write_text(content)
    with pytest.raises(CorruptionError):
        DataDirectory.open(path)


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_lost_store_key_is_corruption(path: Path, content: bytes | None) -> None:
    DataDirectory.open(path).close()
    (path / "store_key").unlink()
    if content is not None:
        (path / "store_key").write_bytes(content)
    with pytest.raises(CorruptionError, match="store key"):
        DataDirectory.open(path)


@pytest.mark.parametrize("create", [True, False])
def test_another_stores_key_is_refused_and_its_own_is_taken_again(path: Path, *, create: bool) -> None:
    DataDirectory.open(path).close()
    key = (path / "store_key").read_bytes()
    before = (path / "FORMAT").read_bytes()
    (path / "store_key").write_bytes(os.urandom(32))
    with pytest.raises(ConfigurationError) as refused:
        DataDirectory.open(path, create=create)
    assert refused.value.problems == [f"{path}/store_key is not this store's: put back the one that belongs to it"]
    assert (path / "FORMAT").read_bytes() == before
    (path / "store_key").write_bytes(key)
    with DataDirectory.open(path, create=create) as data:
        assert data.store_key == key


def as_of_a_version_without_the_tag(path: Path) -> bytes:
    """Its `FORMAT`, as such a version writes it."""
    file = path / "FORMAT"
    text = b"".join(
        line for line in file.read_bytes().splitlines(keepends=True) if not line.startswith(b"store_key_tag")
    )
    file.write_bytes(text)
    return text


def test_a_start_marks_the_key_of_a_directory_that_an_earlier_version_made_and_a_check_does_not(path: Path) -> None:
    DataDirectory.open(path).close()
    made = (path / "FORMAT").read_bytes()
    without = as_of_a_version_without_the_tag(path)
    assert without != made
    DataDirectory.open(path, create=False).close()
    assert (path / "FORMAT").read_bytes() == without
    DataDirectory.open(path).close()
    assert (path / "FORMAT").read_bytes() == made


def test_a_full_disk_keeps_no_directory_of_an_earlier_version_from_opening(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DataDirectory.open(path).close()
    without = as_of_a_version_without_the_tag(path)

    def refuse(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with DataDirectory.open(path) as data:
            data.note_nvme_path(path / "nvme")
            assert data.noted_nvme_path() is None
    assert (path / "FORMAT").read_bytes() == without
    DataDirectory.open(path).close()


def test_any_key_will_do_where_all_else_is_made_anew(path: Path) -> None:
    with DataDirectory.open(path) as data:
        store_id = data.store_id
    other = os.urandom(32)
    (path / "store_key").write_bytes(other)
    DataDirectory.open(path, takes_any_key=True).close()
    with pytest.raises(ConfigurationError):
        DataDirectory.open(path)
    with DataDirectory.open(path, takes_any_key=True) as data:
        data.adopt(store_id)
    with DataDirectory.open(path) as data:
        assert (data.store_id, data.store_key) == (store_id, other)


def test_a_directory_that_becomes_another_stores_keeps_its_key(path: Path) -> None:
    with DataDirectory.open(path) as data:
        key = data.store_key
        data.adopt(b"\7" * 16)
    with DataDirectory.open(path) as again:
        assert (again.store_id, again.store_key) == (b"\7" * 16, key)


def test_a_strangers_directory_is_left_alone(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigurationError, match="neither empty nor a kvobj data directory"):
        DataDirectory.open(path)
    assert (path / "thesis.tex").read_text() == "x"
    assert [each.name for each in path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "leavings", [[], ["lock"], ["lock", "store_key.new"], ["lock", "store_key"], ["lock", "store_key", "FORMAT.new"]]
)
def test_a_first_start_killed_anywhere_begins_again(path: Path, leavings: list[str]) -> None:
    path.mkdir()
    for name in leavings:
        (path / name).write_bytes(b"half")
    with DataDirectory.open(path) as data:
        assert len(data.store_key) == 32


def test_an_absent_store_is_not_made_where_one_must_exist(path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no kvobj data directory"):
        DataDirectory.open(path, create=False)
    assert not path.exists()


def test_a_file_in_its_place_is_a_problem(path: Path) -> None:
    path.write_text("x")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        DataDirectory.open(path)


def test_credentials_are_made_once(path: Path) -> None:
    with DataDirectory.open(path) as data:
        made = data.root_credentials()
        assert data.root_credentials() == made
    with DataDirectory.open(path) as again:
        assert again.root_credentials() == made
    assert read_credentials(path) == made
    assert made.secret_key not in repr(made)


def test_an_override_leaves_the_credentials_file_alone(path: Path) -> None:
    override = RootCredentials("root-key", "root-secret")
    with DataDirectory.open(path) as data:
        assert data.root_credentials(override) == override
        assert not data.credentials_path.exists()


def test_credentials_open_to_others_are_refused_with_the_remedy(path: Path) -> None:
    with DataDirectory.open(path) as data:
        data.root_credentials()
        data.credentials_path.chmod(0o644)
        with pytest.raises(ConfigurationError, match="chmod 600"):
            data.root_credentials()


@pytest.mark.parametrize("content", ["access_key = 1", "access_key = 'x'", "[", ""])
def test_credentials_that_are_none_are_refused(path: Path, content: str) -> None:
    with DataDirectory.open(path) as data:
        data.root_credentials()
        data.credentials_path.write_text(content)
        with pytest.raises(ConfigurationError):
            data.root_credentials()


def test_endpoints_stand_while_the_server_runs(path: Path) -> None:
    with DataDirectory.open(path) as data:
        assert read_admin_endpoint(path) is None
        data.write_endpoints(s3="http://127.0.0.1:1", admin="http://127.0.0.1:2")
        assert read_admin_endpoint(path) == "http://127.0.0.1:2"
    assert read_admin_endpoint(path) is None


def test_the_default_nvme_capacity_does_not_move_as_the_tier_fills() -> None:
    empty = default_nvme_capacity_bytes(free_bytes=40 * 2**30)
    assert empty == 20 * 2**30
    assert default_nvme_capacity_bytes(free_bytes=30 * 2**30, used_bytes=10 * 2**30) == empty
    assert default_nvme_capacity_bytes(free_bytes=2**40) == 64 * 2**30
    assert default_nvme_capacity_bytes(free_bytes=2**29) == 2**28
