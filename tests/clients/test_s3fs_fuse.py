"""s3fs-fuse: a bucket mounted as a folder, and what programs do in folders. Needs /dev/fuse and the right to mount."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from client_suite import body_of, client_server
from module_paths import ModulePaths
from server_process import MIB, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server_process import ServerProcess

BUCKET = "mounted"


def what_is_missing() -> str | None:
    """What this machine lacks for mounting. Locally that skips the tests; .ci/run leaves them out where FUSE cannot be had."""
    if shutil.which("s3fs") is None or shutil.which("fusermount") is None:
        return "s3fs is not here: apt-get install --no-install-recommends s3fs"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse that may be opened"
    return None


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    if (missing := what_is_missing()) is not None:
        pytest.skip(missing)
    with client_server(module_paths.mktemp("s3fs-fuse")) as running:
        with running.raw() as raw:
            assert raw.request("PUT", f"/{BUCKET}").status == 200
        yield running


@pytest.fixture
def folder(server: ServerProcess, tmp_path: Path) -> Iterator[Path]:
    credentials = server.credentials()
    keys = tmp_path / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"{credentials.access_key}:{credentials.secret_key}\n")
    place = tmp_path / "mounted"
    place.mkdir()
    options = (
        f"url={server.endpoint},passwd_file={keys},use_path_request_style,endpoint={credentials.region},"
        "multipart_size=5,retries=1"
    )
    log = tmp_path / "s3fs.log"
    with log.open("w") as output:  # in the foreground: no daemon is left behind whatever happens
        mounter = subprocess.Popen(["s3fs", BUCKET, str(place), "-f", "-o", options], stdout=output, stderr=output)
    try:
        wait_until(
            lambda: os.path.ismount(place) or mounter.poll() is not None, timeout_seconds=20, what="the bucket's mount"
        )
        assert mounter.poll() is None, log.read_text()
        yield place
    finally:
        subprocess.run(["fusermount", "-u", "-z", str(place)], capture_output=True, check=False)
        try:
            mounter.wait(20)
        except subprocess.TimeoutExpired:
            mounter.kill()
            mounter.wait()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_files_are_written_read_changed_renamed_and_removed(server: ServerProcess, folder: Path) -> None:
    (folder / "sub" / "ünïcödé").mkdir(parents=True)
    small, large = body_of(70_001, 1), body_of(11 * MIB + 77, 2)  # the large one goes in parts
    (folder / "sub" / "ünïcödé" / "a + b.bin").write_bytes(small)
    (folder / "large").write_bytes(large)
    (folder / "empty").touch()
    assert (folder / "sub" / "ünïcödé" / "a + b.bin").read_bytes() == small
    assert digest(folder / "large") == hashlib.sha256(large).hexdigest()
    assert sorted(path.name for path in folder.iterdir()) == ["empty", "large", "sub"]
    with server.raw() as raw:  # what the bucket holds is what was written
        assert raw.request("GET", f"/{BUCKET}/large").body == large

    with (folder / "large").open("r+b") as file:
        file.seek(6 * MIB)
        file.write(b"changed in the middle")
        file.seek(0, os.SEEK_END)
        file.write(b"and at the end")
    changed = bytearray(large) + b"and at the end"
    changed[6 * MIB : 6 * MIB + 21] = b"changed in the middle"
    assert digest(folder / "large") == hashlib.sha256(changed).hexdigest()
    with (folder / "large").open("r+b") as file:
        file.truncate(5000)
    assert (folder / "large").read_bytes() == changed[:5000]

    (folder / "sub").rename(folder / "moved")
    assert (folder / "moved" / "ünïcödé" / "a + b.bin").read_bytes() == small
    (folder / "link").symlink_to("moved")
    assert (folder / "link").readlink() == Path("moved")
    (folder / "empty").chmod(0o640)
    os.utime(folder / "empty", (1_700_000_000, 1_700_000_000))
    told = (folder / "empty").stat()
    assert (told.st_mode & 0o777, int(told.st_mtime), told.st_size) == (0o640, 1_700_000_000, 0)
    with pytest.raises(FileNotFoundError):
        (folder / "absent").read_bytes()
    shutil.rmtree(folder / "moved")
    for name in ("large", "empty", "link"):
        (folder / name).unlink()
    assert list(folder.iterdir()) == []


def test_a_tree_is_copied_in_and_out(folder: Path, tmp_path: Path) -> None:
    tree = {f"{number % 3}/{number}": body_of(100 + 999 * number, number) for number in range(12)}
    for name, body in tree.items():
        (tmp_path / "up" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "up" / name).write_bytes(body)
    subprocess.run(["cp", "-r", str(tmp_path / "up"), str(folder / "tree")], check=True, timeout=60)
    subprocess.run(["cp", "-r", str(folder / "tree"), str(tmp_path / "down")], check=True, timeout=60)
    assert {name: (tmp_path / "down" / name).read_bytes() for name in tree} == tree
    shutil.rmtree(folder / "tree")
    assert not (folder / "tree").exists()
