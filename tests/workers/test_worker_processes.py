"""Worker processes of a real server: what they serve, what becomes of it when one of them dies, hangs, or the node stops."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from module_paths import ModulePaths
from raw_http import RawConnection
from server_process import MIB, ServerProcess, wait_until
from worker_server import children_of, idle_of, lives, pid_behind, pids_of, wait_for_workers, worker_server, workers_of

from kvobj.app.worker_pool import SILENT_SECONDS
from kvobj.client import Credentials, KvClient

REPLACED_SECONDS = 10.0
"""Of a loaded machine; alone it takes a fifth of a second."""
STANDSTILL_SECONDS = SILENT_SECONDS + 2.0


@pytest.fixture(scope="module")
def shared(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with worker_server(module_paths.mktemp("workers"), dram_bytes=512 * MIB) as server:  # nothing is evicted
        yield server


@pytest.fixture
def server(shared: ServerProcess) -> ServerProcess:
    """With all its workers, whatever a test before has done to it."""
    if not shared.is_running:
        shared.kill()  # reaps
        shared.start()
    wait_for_workers(shared)
    return shared


def restarts_of(server: ServerProcess) -> list[int]:
    return [int(worker["restarts"]) for worker in workers_of(server)]


def body_of(size_bytes: int, seed: int = 0) -> bytes:
    return bytes((index * 31 + seed) % 251 for index in range(min(size_bytes, 4099))).ljust(1) * (
        size_bytes // 4099 + 1
    )


def sized(size_bytes: int, seed: int = 0) -> bytes:
    return body_of(size_bytes, seed)[:size_bytes]


# -- the same behaviour -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", ["plain", "cache", "kept"])
@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 70_000, MIB, 5 * MIB + 1, 30 * MIB])
def test_what_one_worker_was_given_another_returns(server: ServerProcess, bucket: str, size_bytes: int) -> None:
    body, path = sized(size_bytes, len(bucket)), f"/{bucket}/of-{size_bytes}"
    with server.raw() as raw:
        assert raw.request("PUT", path, body).status == 200
    seen: set[int] = set()
    for _ in range(64):
        with RawConnection(server.host, server.port) as connection, server.raw() as signer:
            seen.add(pid_behind(server, connection))
            connection.send(signer.head("GET", path).head)
            reply = connection.read_reply()
            assert (reply.status, reply.body) == (200, body)
        if len(seen) == 2 or size_bytes > MIB:
            break
    assert size_bytes > MIB or seen == set(pids_of(server))


def test_connections_are_spread_over_the_workers(server: ServerProcess) -> None:
    connections = [RawConnection(server.host, server.port) for _ in range(32)]
    try:
        owners = [pid_behind(server, connection) for connection in connections]
    finally:
        for connection in connections:
            connection.close()
    assert min(owners.count(pid) for pid in pids_of(server)) >= 4  # one in 4 million is less even


def test_a_changed_bucket_is_seen_by_every_worker_at_once(server: ServerProcess) -> None:
    """Rows of buckets are remembered: none may be out of date once the change was acknowledged."""
    with RawConnection(server.host, server.port) as one, server.raw() as signer:
        first = pid_behind(server, one)
        other = RawConnection(server.host, server.port)
        while pid_behind(server, other) == first:
            other.close()
            other = RawConnection(server.host, server.port)
        with other:

            def asked(connection: RawConnection, method: str) -> int:
                head = signer.head(method, "/changing", headers={"content-length": "0"})
                connection.send(head.head)
                return connection.read_reply(has_body=method != "HEAD").status

            for _ in range(20):
                assert asked(one, "HEAD") == asked(other, "HEAD") == 404
                assert asked(one, "PUT") == 200
                assert asked(other, "HEAD") == asked(one, "HEAD") == 200
                assert asked(other, "DELETE") == 204


def test_parts_of_an_upload_may_come_through_different_workers(server: ServerProcess) -> None:
    with server.raw() as raw:
        upload = raw.request("POST", "/plain/joined", query={"uploads": ""})
        upload_id = upload.body.split(b"<UploadId>")[1].split(b"</UploadId>")[0].decode()
        etags = []
        for number in (1, 2):
            query = {"partNumber": str(number), "uploadId": upload_id}
            reply = raw.request("PUT", "/plain/joined", sized(5 * MIB, number), query=query)
            etags.append(reply.headers["etag"])
            raw.close()  # the next connection may go to another worker
        parts = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>" for number, etag in enumerate(etags, 1)
        )
        document = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        assert raw.request("POST", "/plain/joined", document, query={"uploadId": upload_id}).status == 200
        assert raw.request("GET", "/plain/joined").body == sized(5 * MIB, 1) + sized(5 * MIB, 2)


@pytest.mark.parametrize("bucket", ["cache", "kept"])
def test_what_has_come_of_a_chunk_is_followed_before_the_rest_comes(server: ServerProcess, bucket: str) -> None:
    """Where the store process writes it down meanwhile, and where nobody but the follower asks."""
    size_bytes, half = 9 * MIB, 5 * MIB
    body = sized(size_bytes, 5)
    keys = server.credentials()
    credentials = Credentials(keys.access_key, keys.secret_key)
    with (
        RawConnection(server.host, server.port) as writer,
        server.raw() as signer,
        KvClient(server.endpoint, credentials, bucket, timeout_seconds=20.0) as client,
    ):
        writer.send(signer.head("PUT", f"/{bucket}/followed", headers={"content-length": str(size_bytes)}).head)
        writer.send(body[:half])
        coming = client.follow_chunk("followed", wait_seconds=20.0)
        seen = bytearray()
        while len(seen) < half - MIB:  # how far it has come is told in steps
            seen += next(coming)
        writer.send(body[half:])
        seen += b"".join(coming)
        assert writer.read_reply().status == 200
        assert bytes(seen) == body
        assert signer.request("DELETE", f"/{bucket}/followed").status == 204


def test_nothing_is_held_when_nobody_asks(server: ServerProcess) -> None:
    with server.raw() as raw:
        assert raw.request("PUT", "/cache/held", sized(MIB)).status == 200
        for _ in range(50):
            assert raw.request("GET", "/cache/held").status == 200
    wait_until(
        lambda: server.status()["queues"]["blobs_in_use"] == 0, timeout_seconds=10, what="all frames to be given back"
    )


def test_status_and_metrics_are_those_of_all_workers(server: ServerProcess) -> None:
    def requests() -> int:
        return sum(int(worker["requests"]) for worker in workers_of(server))

    before, restarts = requests(), restarts_of(server)
    with server.raw() as raw:
        for _ in range(10):
            raw.request("HEAD", "/plain")
    assert requests() == before + 10
    found = workers_of(server)
    assert all(worker["cpu_seconds"] > 0 and worker["is_ready"] for worker in found)
    assert [worker["restarts"] for worker in found] == restarts
    with RawConnection(server.host, server.admin_port) as admin:
        admin.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        page = admin.read_reply().body.decode()
    counted = [line for line in page.splitlines() if line.startswith("kvobj_s3_requests_total")]
    assert sum(float(line.rpartition(" ")[2]) for line in counted) == requests()
    assert page.count("# TYPE kvobj_s3_requests_total") == 1


# -- a worker dies ------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_loses_nothing_acknowledged(server: ServerProcess) -> None:
    kept: dict[str, bytes] = {}
    restarts = restarts_of(server)
    with server.raw() as raw:
        for number in range(12):
            path, body = f"/cache/acknowledged-{number}", sized(700_000, number)
            assert raw.request("PUT", path, body).status == 200
            kept[path] = body
        # Class `memory`, hashed after the acknowledgement: the last of them may not be hashed yet.
        victims = set(pids_of(server))
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        raw.close()
        began = time.monotonic()
        wait_for_workers(server, without=victims)
        assert time.monotonic() - began < REPLACED_SECONDS
        for path, body in kept.items():
            assert raw.request("GET", path).body == body
    assert restarts_of(server) == [count + 1 for count in restarts]
    assert {worker["last_end"] for worker in workers_of(server)} == {"SIGKILL"}
    server.settled_occupancy()  # what the dead had left unhashed was hashed, and written down


@pytest.mark.parametrize("how", ["is refused", "dies with its worker"])
def test_a_chunks_first_part_that_fails_does_not_say_of_how_many_the_chunk_is(server: ServerProcess, how: str) -> None:
    declared = {"model": "m", "chunk_tokens": 16, "layout": {"kind": "opaque"}, "ids": "foreign", "part_axis": "rank"}
    target = f"/cache/parted/{how.replace(' ', '-')}"

    def place(part: str, **more: str) -> dict[str, str]:
        said = {"namespace": "parted", "parent": "root", "tokens": "16", "part": part}
        return {f"x-kvobj-{name}": value for name, value in said.items()} | more

    with server.raw() as raw, RawConnection(server.host, server.port) as connection:
        document, fields = json.dumps(declared).encode(), {"content-type": "application/json"}
        query = {"namespace": "parted"}
        assert raw.request("PUT", "/cache", document, query=query, headers=fields).status == 200
        if how == "is refused":
            wrong = place("0/4", **{"x-amz-checksum-crc32": "AAAAAA=="})
            assert b"BadDigest" in raw.request("PUT", target, sized(5000), headers=wrong).body
        else:
            before = server.settled_occupancy()
            connection.send(raw.head("PUT", target, headers=place("0/4", **{"content-length": str(MIB)})).head)
            connection.send(sized(1000))
            wait_until(
                lambda: server.occupancy()["arena reserved_bytes"] > before["arena reserved_bytes"],
                timeout_seconds=10,
                what="room for the part",
            )
            victim = pid_behind(server, connection)
            os.kill(victim, signal.SIGKILL)
            assert connection.is_closed_by_peer()
            wait_for_workers(server, without={victim})
            server.wait_for_occupancy(before)
            raw.close()
        for part in ("1/2", "0/2"):
            reply = raw.request("PUT", target, sized(5000, int(part[0])), headers=place(part))
            assert reply.status == 200, reply.body
        assert raw.request("GET", target).body == sized(5000, 0) + sized(5000, 1)


@pytest.mark.parametrize(
    ("bucket", "sent_bytes"), [("cache", 0), ("cache", 300_000), ("plain", 6 * MIB), ("kept", 6 * MIB)]
)
def test_what_a_killed_worker_was_receiving_leaves_nothing(server: ServerProcess, bucket: str, sent_bytes: int) -> None:
    before = server.settled_occupancy()
    with RawConnection(server.host, server.port) as connection, server.raw() as signer:
        headers = {"content-length": str(40 * MIB)}
        connection.send(signer.head("PUT", f"/{bucket}/cut-{sent_bytes}", headers=headers).head)
        connection.send(sized(sent_bytes))
        wait_until(
            lambda: server.occupancy()["arena reserved_bytes"] > before["arena reserved_bytes"],
            timeout_seconds=10,
            what="room for the body",
        )
        victim = pid_behind(server, connection)
        os.kill(victim, signal.SIGKILL)
        assert connection.is_closed_by_peer()
    wait_for_workers(server, without={victim})
    server.wait_for_occupancy(before)
    with server.raw() as raw:
        assert raw.request("GET", f"/{bucket}/cut-{sent_bytes}").status == 404


def test_chunks_of_one_size_are_right_though_some_of_their_writers_go_away(server: ServerProcess) -> None:
    """Rooms at hand go from writer to writer: none reads what another left there, and none is kept."""
    before = server.settled_occupancy()
    size_bytes, turns = 300_000, 24

    def write(writer: int) -> list[str]:
        stored: list[str] = []
        with server.raw() as raw:
            for turn in range(turns):
                path = f"/cache/room-{writer}-{turn}"
                body = sized(size_bytes, writer * turns + turn)
                if turn % 4 == 3:
                    with RawConnection(server.host, server.port) as connection:
                        connection.send(raw.head("PUT", path, headers={"content-length": str(size_bytes)}).head)
                        connection.send(body[: size_bytes // 3 * (turn % 3)])
                    continue
                reply = raw.request("PUT", path, body)
                assert reply.status == 200, reply.body
                stored.append(path)
        return stored

    with ThreadPoolExecutor(4) as writers:
        found = list(writers.map(write, range(4)))
    with server.raw() as raw:
        for writer, paths in enumerate(found):
            for turn in range(turns):
                path = f"/cache/room-{writer}-{turn}"
                reply = raw.request("GET", path)
                assert reply.status == (200 if path in paths else 404), reply.body
                if reply.status == 200:
                    assert reply.body == sized(size_bytes, writer * turns + turn)
                    assert raw.request("DELETE", path).status == 204
    server.wait_for_occupancy(before)


def test_what_was_acknowledged_is_right_though_workers_are_killed_while_others_write(server: ServerProcess) -> None:
    """Most of these chunks lie in rooms that a worker had at hand, and their hashes were still to be told when it died."""
    before = server.settled_occupancy()
    size_bytes, kept, kills = 400_000, 60, 3
    may_end = threading.Event()

    def write(writer: int) -> dict[str, bytes]:
        stored: dict[str, bytes] = {}
        turn = 0
        while not may_end.is_set():
            with suppress(OSError, RuntimeError), server.raw() as raw:  # a killed worker takes its connections along
                while not may_end.is_set():
                    turn += 1
                    path, body = f"/cache/killed-{writer}-{turn}", sized(size_bytes, writer + turn)
                    if raw.request("PUT", path, body).status == 200:
                        stored[path] = body
                    if len(stored) > kept:
                        oldest = next(iter(stored))
                        del stored[oldest]
                        raw.request("DELETE", oldest)
        return stored

    with ThreadPoolExecutor(3) as writers:
        writing = [writers.submit(write, writer) for writer in range(3)]
        try:
            for _ in range(kills):
                victim = pids_of(server)[0]
                os.kill(victim, signal.SIGKILL)
                wait_for_workers(server, without={victim})
        finally:
            may_end.set()
        found = [each.result() for each in writing]
    assert all(found)
    with server.raw() as raw:
        for stored in found:
            for path, body in stored.items():
                reply = raw.request("GET", path)
                assert (reply.status, reply.body) == (200, body), path
        # Also those whose reply their writers never saw.
        names = re.findall(
            "<Key>([^<]+)</Key>", raw.request("GET", "/cache", query={"prefix": "killed-"}).body.decode()
        )
        assert len(names) < 1000
        for name in names:
            assert raw.request("DELETE", f"/cache/{name}").status == 204
    server.wait_for_occupancy(before)


def test_a_killed_worker_lets_go_of_what_it_was_sending(server: ServerProcess) -> None:
    with server.raw() as raw:
        assert raw.request("PUT", "/kept/long", sized(30 * MIB)).status == 200
        before = server.settled_occupancy()
        with RawConnection(server.host, server.port) as connection:
            connection.send(raw.head("GET", "/kept/long").head)
            wait_until(
                lambda: server.status()["queues"]["blobs_in_use"] > 0, timeout_seconds=10, what="the reply to begin"
            )
            victim = pid_behind(server, connection)
            os.kill(victim, signal.SIGKILL)
            wait_for_workers(server, without={victim})
    wait_until(lambda: server.status()["queues"]["blobs_in_use"] == 0, timeout_seconds=10, what="the pins to go")
    with server.raw() as raw:  # the one before may have been the victim's, too
        assert raw.request("DELETE", "/kept/long").status == 204
        after = server.settled_occupancy()
    assert after["nvme blobs"] < before["nvme blobs"]


def test_a_worker_that_answers_nothing_is_killed_and_replaced(server: ServerProcess) -> None:
    with RawConnection(server.host, server.port) as connection:
        victim = pid_behind(server, connection)
        os.kill(victim, signal.SIGSTOP)
        wait_until(lambda: not lives(victim), timeout_seconds=30, what="the stopped worker to be killed")
    wait_for_workers(server, without={victim})
    with server.raw() as raw:
        for _ in range(8):
            assert raw.request("GET", "/plain").status == 200
            raw.close()


def test_workers_outlive_a_standstill_of_the_store_process(server: ServerProcess) -> None:
    """Longer than one of theirs is suffered."""
    workers, restarts = pids_of(server), restarts_of(server)
    logged = len(server.log_path.read_text())
    with server.hanging():
        time.sleep(STANDSTILL_SECONDS)  # it is what this is about
    assert [worker["pid"] for worker in workers_of(server)] == workers  # asked of both, so both were looked at
    with server.raw() as raw:
        assert raw.request("GET", "/plain").status == 200
    assert (pids_of(server), restarts_of(server)) == (workers, restarts)
    assert "answers nothing" not in server.log_path.read_text()[logged:]


def test_the_idle_process_is_there_again_after_a_shortage_of_descriptors(server: ServerProcess) -> None:
    idle, workers = idle_of(server), pids_of(server)
    limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # no more than it has
    try:
        os.kill(idle, signal.SIGKILL)
        wait_until(
            lambda: "no idle worker process can be started" in server.log_path.read_text(),
            timeout_seconds=30,
            what="the shortage to be told of",
        )
        assert children_of(server.pid) == set(workers)
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
    assert idle_of(server) != idle
    assert pids_of(server) == workers  # none of them had to die for it
    assert "never retrieved" not in server.log_path.read_text()


def test_workers_that_die_at_once_are_started_after_growing_pauses_and_status_says_so(server: ServerProcess) -> None:
    ends: list[int] = []

    def kill_one() -> bool:
        for worker in workers_of(server)[:1]:
            if worker["pid"] and worker["pid"] not in ends:
                ends.append(worker["pid"])
                os.kill(worker["pid"], signal.SIGKILL)
        return len(ends) >= 5

    began = time.monotonic()
    wait_until(kill_one, timeout_seconds=60, what="five deaths", pause_seconds=0.01)
    assert time.monotonic() - began > 0.1 + 0.2 + 0.4 + 0.8 - 0.1
    wait_until(
        lambda: any("again and again" in note for note in server.status()["notes"]),
        timeout_seconds=10,
        what="status to tell of it",
    )
    wait_for_workers(server, without=set(ends))
    assert not any("again and again" in note for note in server.status()["notes"])


# -- the node stops -----------------------------------------------------------------------------------------------------


def test_workers_end_with_a_store_process_that_is_killed_and_memory_is_adopted(server: ServerProcess) -> None:
    body = sized(900_000)
    with server.raw() as raw:
        assert raw.request("PUT", "/cache/survivor", body).status == 200
    workers = pids_of(server)
    server.kill()
    wait_until(lambda: not any(lives(pid) for pid in workers), timeout_seconds=10, what="the workers to end")
    server.start()
    with server.raw() as raw:
        assert raw.request("GET", "/cache/survivor").body == body


def test_a_clean_stop_finishes_what_is_in_flight_and_ends_all(server: ServerProcess) -> None:
    workers, body = pids_of(server), sized(2 * MIB)
    with RawConnection(server.host, server.port) as connection, server.raw() as signer:
        head = signer.head("PUT", "/kept/last", headers={"content-length": str(len(body))})
        connection.send(head.head + body[:MIB])
        os.kill(server.pid, signal.SIGTERM)
        connection.send(body[MIB:])
        assert connection.read_reply().status == 200
    assert server.terminate() == 0
    assert not any(lives(pid) for pid in workers)
    server.start()
    with server.raw() as raw:
        assert raw.request("GET", "/kept/last").body == body


def test_a_warm_stop_leaves_memory_to_the_next_start(server: ServerProcess) -> None:
    with server.raw() as raw:
        assert raw.request("PUT", "/cache/warm", sized(MIB)).status == 200
    os.kill(server.pid, signal.SIGUSR2)
    wait_until(lambda: not server.is_running, timeout_seconds=30, what="the warm stop")
    server.kill()  # reaps
    server.start()
    with server.raw() as raw:
        reply = raw.request("GET", "/cache/warm")
    assert reply.body == sized(MIB)
    assert reply.headers["x-kvobj-tier"] == "dram"


def test_signals_of_a_terminal_are_answered_by_the_store_process_alone(server: ServerProcess) -> None:
    workers = pids_of(server)
    for pid in workers:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            os.kill(pid, each)
    with server.raw() as raw:
        assert raw.request("GET", "/plain").status == 200
    assert pids_of(server) == workers
