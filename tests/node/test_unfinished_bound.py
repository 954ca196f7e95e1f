"""What the parts of a user's unfinished uploads may hold: counted by one process and by workers, exact however many come at once,
given back by whatever ends an upload, and known again after a restart."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from module_paths import ModulePaths
from raw_http import Credentials, RawConnection, RawReply, RawS3
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, UserSetting, wait_until

LIMIT = 8 * MIB
PART = bytes(3 * MIB)
ANN = UserSetting("ann", "ann-access-key", "ann-secret-key-0123456789")
BOB = UserSetting("bob", "bob-access-key", "bob-secret-key-0123456789")
BUCKETS = (
    BucketSetting("plain", owner="ann"),
    BucketSetting("bobs", owner="bob"),
    BucketSetting("roots"),
    BucketSetting("cache", "kv", "local", owner="ann"),
)

LAYOUT = {"kind": "kv", "dtype": "bf16", "layers": 2, "kv_heads": 8, "head_dim": 128}
DECLARATION = {"model": "m", "chunk_tokens": 768, "layout": LAYOUT, "ids": "foreign", "part_axis": "layer"}
"""A chunk is two of `PART`."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "workers"])
def server(request: pytest.FixtureRequest, module_paths: ModulePaths) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        nvme_bytes=512 * MIB,
        buckets=BUCKETS,
        users=(ANN, BOB),
        workers=request.param,
        sections={"limits": {"unfinished_bytes_per_user": f'"{LIMIT // MIB} MiB"'}},
    )
    with ServerProcess(module_paths.mktemp("unfinished"), settings) as running:
        client = Client(running, ANN, "cache")
        with client.raw:
            as_json = {"content-type": "application/json"}
            body = json.dumps(DECLARATION).encode()
            declared = client.raw.request("PUT", "/cache", body, query={"namespace": "parted"}, headers=as_json)
            assert declared.status == 200, declared.body
        yield running


class Client:
    """Uploads of one user."""

    def __init__(self, server: ServerProcess, user: UserSetting | None, bucket: str) -> None:
        credentials = server.credentials() if user is None else Credentials(user.access_key, user.secret_key)
        self.raw = RawS3(server.host, server.port, credentials)
        self.bucket = bucket

    def begin(self, key: str) -> RawReply:
        return self.raw.request("POST", f"/{self.bucket}/{key}", query={"uploads": ""})

    def begun(self, key: str) -> dict[str, str]:
        """The query that names the new upload."""
        reply = self.begin(key)
        assert reply.status == 200, reply.body
        return {"uploadId": reply.body.split(b"<UploadId>")[1].split(b"</UploadId>")[0].decode()}

    def part(self, key: str, upload: dict[str, str], number: int, body: bytes = PART, **headers: str) -> RawReply:
        query = {"partNumber": str(number), **upload}
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.raw.request("PUT", f"/{self.bucket}/{key}", body, query=query, headers=fields)

    def layer(self, key: str, index: int) -> RawReply:
        """One of the two parts of a chunk."""
        return self.raw.request("PUT", f"/cache/parted/{key}", PART, headers={"x-kvobj-part": f"{index}/2"})

    def complete(self, key: str, upload: dict[str, str], etag: str) -> int:
        document = (
            "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber>"
            f"<ETag>{etag}</ETag></Part></CompleteMultipartUpload>"
        ).encode()
        return self.raw.request("POST", f"/{self.bucket}/{key}", document, query=upload).status

    def abort(self, key: str, upload: dict[str, str]) -> int:
        return self.raw.request("DELETE", f"/{self.bucket}/{key}", query=upload).status


@pytest.fixture
def ann(server: ServerProcess) -> Iterator[Client]:
    client = Client(server, ANN, "plain")
    with client.raw:
        yield client
    assert held(server) == {}, "the test left something"


def held(server: ServerProcess) -> dict[str, int]:
    found: dict[str, int] = server.status()["unfinished"]
    return found


def settled(server: ServerProcess, expected: dict[str, int]) -> None:
    """A reply is sent a moment before its transfer has ended."""
    wait_until(lambda: held(server) == expected, timeout_seconds=5, what=f"{expected}, not {held(server)}")


def assert_refused(reply: RawReply) -> None:
    assert (reply.status, b"<Code>QuotaExceeded</Code>" in reply.body) == (403, True), reply.body


def test_a_part_above_the_bound_is_refused_and_what_is_there_can_be_completed(
    server: ServerProcess, ann: Client
) -> None:
    upload = ann.begun("a")
    first = ann.part("a", upload, 1)
    assert (first.status, ann.part("a", upload, 2).status) == (200, 200)
    assert_refused(ann.part("a", upload, 3))
    assert held(server) == {"ann": len(2 * PART)}
    assert ann.part("a", upload, 3, bytes(LIMIT - len(2 * PART))).status == 200  # up to the last byte
    assert_refused(ann.begin("b"))
    assert_refused(ann.part("a", upload, 4, b"x"))
    assert ann.complete("a", upload, first.headers["etag"]) == 200
    settled(server, {})
    other = ann.begun("b")
    assert ann.abort("b", other) == 204


def test_a_refused_body_is_not_asked_for(ann: Client) -> None:
    upload = ann.begun("wide")
    head = ann.raw.head(
        "PUT",
        "/plain/wide",
        query={"partNumber": "1", **upload},
        headers={"content-length": str(LIMIT + 1), "expect": "100-continue"},
    )
    with ann.raw.connect() as connection:
        connection.send(head.head)
        assert_refused(connection.read_reply())
    assert ann.abort("wide", upload) == 204


def test_a_replaced_part_counts_once_and_an_abort_gives_all_back(server: ServerProcess, ann: Client) -> None:
    upload = ann.begun("again")
    assert ann.part("again", upload, 1).status == 200
    assert ann.part("again", upload, 1, PART[:-5]).status == 200
    settled(server, {"ann": len(PART) - 5})
    assert ann.abort("again", upload) == 204
    settled(server, {})


def test_a_copied_part_counts_like_a_sent_one(server: ServerProcess, ann: Client) -> None:
    assert ann.raw.request("PUT", "/plain/source", PART).status == 200
    upload = ann.begun("copied")
    copies = [ann.part("copied", upload, number, b"", x_amz_copy_source="/plain/source") for number in (1, 2, 3)]
    assert [copy.status for copy in copies] == [200, 200, 403]
    assert_refused(copies[2])
    assert ann.abort("copied", upload) == 204
    settled(server, {})


def test_chunks_in_parts_count_with_uploads_until_they_are_whole(server: ServerProcess, ann: Client) -> None:
    assert [ann.layer(key, 0).status for key in ("one", "two")] == [200, 200]
    settled(server, {"ann": len(2 * PART)})
    assert_refused(ann.layer("three", 0))
    assert ann.raw.request("DELETE", "/cache/parted/two").status == 204
    settled(server, {"ann": len(PART)})
    assert ann.layer("one", 1).status == 200  # the last one: the chunk is whole
    settled(server, {})


def test_other_users_and_root_are_not_bound_by_it(server: ServerProcess, ann: Client) -> None:
    upload = ann.begun("mine")
    assert [ann.part("mine", upload, number).status for number in (1, 2, 3)] == [200, 200, 403]
    bob, root = Client(server, BOB, "bobs"), Client(server, None, "roots")
    with bob.raw, root.raw:
        bobs, roots = bob.begun("his"), root.begun("its")
        assert bob.part("his", bobs, 1).status == 200
        assert [root.part("its", roots, number).status for number in range(1, 5)] == [200] * 4
        settled(server, {"ann": len(2 * PART), "bob": len(PART), "root": len(4 * PART)})
        assert (bob.abort("his", bobs), root.abort("its", roots)) == (204, 204)
    assert ann.abort("mine", upload) == 204
    settled(server, {})


def test_of_many_at_once_just_so_many_get_in_as_fit(server: ServerProcess, ann: Client) -> None:
    upload = ann.begun("crowd")
    gate = threading.Barrier(12)

    def put(number: int) -> int:
        client = Client(server, ANN, "plain")
        with client.raw:
            gate.wait(30)
            return client.part("crowd", upload, number, bytes(MIB)).status

    with ThreadPoolExecutor(12) as threads:
        statuses = list(threads.map(put, range(1, 13)))
    assert sorted(statuses) == [200] * 8 + [403] * 4
    settled(server, {"ann": LIMIT})
    assert ann.abort("crowd", upload) == 204
    settled(server, {})


def test_a_client_that_goes_in_the_middle_of_a_part_gives_its_room_back(server: ServerProcess, ann: Client) -> None:
    upload = ann.begun("gone")
    query, length = {"partNumber": "1", **upload}, {"content-length": str(LIMIT)}
    with ann.raw.connect() as connection:
        connection.send(ann.raw.head("PUT", "/plain/gone", query=query, headers=length).head + bytes(MIB))
        settled(server, {"ann": LIMIT})
        assert_refused(ann.part("gone", upload, 2, b"x"))
    settled(server, {})
    assert ann.abort("gone", upload) == 204


def test_the_numbers_are_in_status_and_metrics(server: ServerProcess, ann: Client) -> None:
    upload = ann.begun("told")
    assert ann.part("told", upload, 1).status == 200
    settled(server, {"ann": len(PART)})
    assert server.status()["unfinished_limit_bytes"] == LIMIT
    with RawConnection(server.host, server.admin_port) as admin:
        admin.send(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
        lines = admin.read_reply().body.decode().splitlines()
    (told,) = [line for line in lines if line.startswith('kvobj_unfinished_bytes{user="ann"} ')]
    assert float(told.split()[1]) == len(PART)
    (refusals,) = [line for line in lines if line.startswith("kvobj_unfinished_refusals_total ")]
    assert float(refusals.split()[1]) > 0
    assert ann.abort("told", upload) == 204
    settled(server, {})


def test_the_sum_outlives_a_restart(server: ServerProcess) -> None:
    client = Client(server, ANN, "plain")
    with client.raw:
        upload = client.begun("kept")
        assert client.part("kept", upload, 1).status == 200
        assert client.layer("kept", 0).status == 200
    if server.settings.workers == 1:
        assert server.terminate() == 0
    else:
        server.kill()  # and after a crash
    server.start()
    with client.raw:
        settled(server, {"ann": len(2 * PART)})
        assert_refused(client.part("kept", upload, 2))
        assert client.abort("kept", upload) == 204
        assert client.raw.request("DELETE", "/cache/parted/kept").status == 204
    settled(server, {})
