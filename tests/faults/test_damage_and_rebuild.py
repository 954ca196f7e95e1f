"""What a disk can do to bytes at rest, and what a lost catalog can be rebuilt from; and a clean stop.

Damage is done to the files of a stopped server, by people who know nothing of its formats: they look for the bytes that
they stored and flip one bit in them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from module_paths import ModulePaths
from server_process import MIB, REPOSITORY, BucketSetting, ServerProcess, ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from raw_http import RawReply, RawS3

SIZES = {"inline": 30_000, "segment": 700_000, "large": 5 * MIB + 3}
BUCKETS = ("plain", "chunks")


SETTINGS = ServerSettings(
    dram_bytes=64 * MIB,
    nvme_bytes=128 * MIB,
    buckets=(BucketSetting("plain"), BucketSetting("chunks", "kv", "memory")),
)
ENDS = ("first", "last")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, SETTINGS) as running:
        yield running


def body_of(name: str) -> bytes:
    return random.Random(name).randbytes(SIZES[name.split("-", maxsplit=1)[0]])


def files_under(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def flip_bit(server: ServerProcess, needle: bytes, offset: int) -> int:
    """Flip one bit `offset` bytes behind every place where the needle is at rest; how many places there were."""
    places = 0
    for file in files_under(server.data):
        content = file.read_bytes()
        at = content.find(needle)
        while at >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + offset)
                opened.write(bytes([content[at + offset] ^ 0x10]))
            places += 1
            at = content.find(needle, at + 1)
    return places


def get(raw: RawS3, path: str, headers: dict[str, str] | None = None) -> RawReply | None:
    """The reply, or None if the connection was reset in its body: a wrong body is never a whole one."""
    try:
        return raw.request("GET", path, headers=headers)
    except ConnectionError:
        return None


def end_of(body: bytes, where: str) -> int:
    """Where the 64 bytes begin one of which is damaged."""
    return 0 if where == "first" else len(body) - 64


@pytest.fixture(scope="module")
def damaged_server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    """With an object of each kind in each bucket that was damaged at each end while the server was stopped, and a sound one beside
    it; in memory is none of them."""
    with ServerProcess(module_paths.mktemp("damaged"), SETTINGS) as running:
        objects = [
            (bucket, f"{kind}-{bucket}-{where}", where) for bucket in BUCKETS for kind in SIZES for where in ENDS
        ]
        with running.raw() as raw:
            for bucket, name, _ in objects:
                for each in (f"{name}-damaged", f"{name}-sound"):
                    assert raw.request("PUT", f"/{bucket}/{each}", body_of(each)).status == 200
        assert running.terminate() == 0  # what was only in memory is on disk now, and memory is empty
        for _, name, where in objects:
            # A page of LMDB may cut a value into pieces nowhere: its values are contiguous, as segment blobs are.
            body = body_of(f"{name}-damaged")
            at = end_of(body, where)
            assert flip_bit(running, body[at : at + 64], 13) > 0, "the object is nowhere at rest"
        running.start()
        yield running


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("where", ENDS)
def test_a_flipped_bit_on_disk_is_never_served(
    damaged_server: ServerProcess, bucket: str, kind: str, where: str
) -> None:
    damaged, sound = (f"{kind}-{bucket}-{where}-{state}" for state in ("damaged", "sound"))
    body = body_of(damaged)
    needle_at = end_of(body, where)
    with damaged_server.raw() as raw:
        for _ in range(2):  # the second time, nothing may have been kept in memory
            reply = get(raw, f"/{bucket}/{damaged}")
            assert reply is None or reply.status != 200 or reply.body == body, "wrong bytes were served"
            assert reply is None or reply.status >= 400
        inside = get(raw, f"/{bucket}/{damaged}", {"range": f"bytes={needle_at}-{needle_at + 63}"})
        assert inside is None or inside.status >= 400
        assert raw.request("GET", f"/{bucket}/{sound}").body == body_of(sound)
        assert raw.request("PUT", f"/{bucket}/{damaged}-new", b"still alive").status == 200


def test_a_range_beside_the_damage_is_right_or_missing(server: ServerProcess) -> None:
    body = body_of("large-ranged")
    with server.raw() as raw:
        assert raw.request("PUT", "/plain/large-ranged", body).status == 200
    server.terminate()
    assert flip_bit(server, body[:64], 13) > 0
    server.start()
    with server.raw() as raw:
        beside = get(raw, "/plain/large-ranged", {"range": f"bytes={4 * MIB}-{4 * MIB + 999}"})
        assert beside is None or beside.status >= 400 or beside.body == body[4 * MIB : 4 * MIB + 1000]


def truth(server: ServerProcess) -> dict[str, dict[str, object]]:
    """Everything that a client can see of every object: listing, headers, bytes."""
    seen: dict[str, dict[str, object]] = {}
    volatile = {"date", "x-amz-request-id", "x-amz-id-2", "x-kvobj-tier", "connection", "server"}
    with server.raw() as raw:
        for bucket in BUCKETS:
            listing = raw.request("GET", f"/{bucket}", query={"list-type": "2"}, payload=None).body.decode()
            for piece in listing.split("<Key>")[1:]:
                key = piece.partition("</Key>")[0]
                reply = raw.request("GET", f"/{bucket}/{key}")
                assert reply.status == 200
                headers = {name: value for name, value in reply.headers.items() if name not in volatile}
                seen[f"{bucket}/{key}"] = {"listed": piece, "headers": headers, "body": reply.body}
    return seen


def store_some_of_everything(raw: RawS3) -> None:
    for bucket in BUCKETS:
        for kind in SIZES:
            for number in range(3):
                name = f"{kind}-{number}"
                headers = {
                    "content-type": f"kind/{kind}",
                    "x-amz-meta-number": str(number),
                    "cache-control": "no-store",
                }
                assert raw.request("PUT", f"/{bucket}/{name}", body_of(name), headers=headers).status == 200
        for name in ("inline-0", "large-1"):
            assert raw.request("DELETE", f"/{bucket}/{name}").status == 204
        assert raw.request("PUT", f"/{bucket}/empty", b"").status == 200
    for name in ("inline-1", "segment-1"):
        assert raw.request("PUT", f"/plain/{name}", body_of("segment-overwritten")).status == 200
    path = "/plain/in-parts"
    upload = raw.request("POST", path, query={"uploads": ""}, headers={"x-amz-meta-made": "of parts"}).body.decode()
    upload_id = upload.partition("<UploadId>")[2].partition("</UploadId>")[0]
    pieces = (body_of("large-part"), body_of("inline-part"))
    tags = [
        raw.request("PUT", path, piece, query={"partNumber": str(number), "uploadId": upload_id}).headers["etag"]
        for number, piece in enumerate(pieces, 1)
    ]
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>" for number, tag in enumerate(tags, 1)
    )
    request = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    assert raw.request("POST", path, request, query={"uploadId": upload_id}, payload=request).status == 200


def delete_environments(server: ServerProcess) -> int:
    """Remove every LMDB environment, durable and volatile; how many there were."""
    places = [file for root in (server.data, server.shared_memory) for file in root.rglob("data.mdb")]
    for file in places:
        shutil.rmtree(file.parent) if len(list(file.parent.iterdir())) <= 2 else file.unlink()
        file.with_name("lock.mdb").unlink(missing_ok=True)
    return len(places)


def administer(server: ServerProcess, *arguments: str) -> None:
    command = [sys.executable, "-m", "kvobj.admin", *arguments]
    command += ["--config", str(server.configuration), "--data", str(server.data)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("is_clean", [True, False], ids=["after a clean stop", "after a kill"])
def test_a_lost_catalog_is_rebuilt_equal_and_deleted_stays_deleted(server: ServerProcess, *, is_clean: bool) -> None:
    with server.raw() as raw:
        store_some_of_everything(raw)
    server.admin("POST", "/api/v1/flush")
    before = truth(server)
    assert len(before) == 2 * (9 - 2 + 1) + 1
    if is_clean:
        server.terminate()
    else:
        server.kill()
    assert delete_environments(server) >= 1
    administer(server, "rebuild")
    server.start()
    assert truth(server) == before
    with server.raw() as raw:
        assert raw.request("GET", "/plain/inline-0").status == 404
        assert raw.request("PUT", "/plain/after", b"the store goes on").status == 200
    server.terminate()
    administer(server, "fsck")
    assert not server.shared_memory.exists(), "a check leaves nothing in shared memory"


def refusals(server: ServerProcess) -> list[tuple[int, str]]:
    """Status and standard error of each command that opens the data directory of a stopped server."""
    serve = ["kvobj", "serve", "--config", str(server.configuration)]
    offline = [["kvobj.admin", "--data", str(server.data), command] for command in ("fsck", "rebuild")]
    ended = []
    for command in (serve, *offline):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
        )
        ended.append((done.returncode, done.stderr))
    return ended


def test_a_store_does_not_start_with_the_key_of_another_and_loses_nothing(server: ServerProcess) -> None:
    body = body_of("segment-kept")
    with server.raw() as raw:
        for bucket in BUCKETS:
            assert raw.request("PUT", f"/{bucket}/kept", body).status == 200
    server.terminate()
    key = (server.data / "store_key").read_bytes()
    (server.data / "store_key").write_bytes(os.urandom(len(key)))
    for status, told in refusals(server):
        assert status == 2
        assert f"{server.data}/store_key is not this store's: put back the one that belongs to it" in told
    (server.data / "store_key").write_bytes(key)
    server.start()
    with server.raw() as raw:
        for bucket in BUCKETS:
            assert raw.request("GET", f"/{bucket}/kept").body == body


def test_a_rebuild_as_the_server_asks_for_it_finds_segments_that_the_configuration_has_elsewhere(
    tmp_path: Path,
) -> None:
    settings = replace(SETTINGS, nvme_path=tmp_path / "disk" / "nvme")
    with ServerProcess(tmp_path / "server", settings) as server:
        with server.raw() as raw:
            store_some_of_everything(raw)
        server.admin("POST", "/api/v1/flush")
        before = truth(server)
        server.terminate()
        delete_environments(server)
        (status, told), *_ = refusals(server)
        assert status == 1
        assert "kvobj-admin rebuild, with --config" in told
        administer(server, "rebuild")
        assert not (server.data / "nvme").exists()
        server.start()
        assert truth(server) == before


def test_sigterm_finishes_what_is_under_way_and_writes_down_what_is_in_memory(server: ServerProcess) -> None:
    body = body_of("large-slow")
    with server.raw() as raw:
        assert raw.request("PUT", "/chunks/segment-memory", body_of("segment-memory")).status == 200
        head = raw.head(
            "PUT", "/chunks/large-slow", headers={"content-length": str(len(body)), "expect": "100-continue"}
        ).head
        with raw.connect() as connection:
            connection.send(head)
            assert connection.read_reply().status == 100
            connection.send(body[:MIB])
            status: list[int] = []
            os.kill(server.pid, signal.SIGTERM)
            stopping = threading.Thread(target=lambda: status.append(server.terminate()))
            stopping.start()
            connection.send(body[MIB:])
            assert connection.read_reply().status == 200
            stopping.join(60)
    assert status == [0]
    assert not any(server.shared_memory.parent.glob(server.shared_memory.name + "*/*")), "a clean stop frees the arena"
    server.start()
    with server.raw() as raw:
        assert raw.request("GET", "/chunks/large-slow").body == body
        assert raw.request("GET", "/chunks/segment-memory").body == body_of("segment-memory")


def test_a_second_server_on_the_same_data_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    configuration = tmp_path / "second.toml"
    text = server.configuration.read_text()
    configuration.write_text(text.replace(f":{server.admin_port}", ":0").replace(f":{server.port}", ":0"))
    command = [sys.executable, "-m", "kvobj", "serve", "--config", str(configuration)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode not in {0, -9}
    with server.raw() as raw:
        assert raw.request("HEAD", "/plain").status == 200
