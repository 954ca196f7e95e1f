"""A call has one deadline for all ways that it tries, and what ends it early is not taken for a server that is gone."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from module_paths import ModulePaths
from real_client import BUCKET, bytes_of, client_of, credentials_of, kv_server
from server_process import MIB, ServerProcess

from kvobj.client import DEFAULT, KvClient, NewChunk, Session
from kvobj.client.aio import AsyncKvClient, AsyncSession
from kvobj.client.same_host import REST_SECONDS, SameHost
from kvobj.client.same_host_lane import GrantAnswer
from kvobj.errors import (
    AccessDeniedError,
    BusyError,
    CorruptionError,
    InvalidRequestError,
    KvobjError,
    UnavailableError,
)

SECONDS = 1.0
KEY = "kept"
BODY = bytes(range(256)) * 4096

CALLS: dict[str, Callable[[KvClient], object]] = {
    "get_chunk": lambda client: client.get_chunk(KEY),
    "get_chunk into": lambda client: client.get_chunk(KEY, into=bytearray(MIB)),
    "view_chunk": lambda client: client.view_chunk(KEY),
    "view_chunks": lambda client: client.view_chunks([KEY, "other"]),
    "get_chunks": lambda client: client.get_chunks([KEY, "other"], [memoryview(bytearray(MIB)) for _ in range(2)]),
    "mget": lambda client: list(client.mget([KEY])),
    "put_chunk": lambda client: client.put_chunk("new", BODY),
    "mput": lambda client: client.mput([NewChunk("new", BODY)]),
    "mput_batches": lambda client: _raised(client.mput_batches([[NewChunk("new", BODY)], [NewChunk("newer", BODY)]])),
}

BOUNDED: dict[str, Callable[[KvClient, Session], object]] = {
    "get_chunk": lambda client, _: client.get_chunk(KEY, timeout_seconds=SECONDS),
    "get_chunks": lambda client, _: client.get_chunks([KEY], [memoryview(bytearray(MIB))], timeout_seconds=SECONDS),
    "view_chunk": lambda client, _: client.view_chunk(KEY, timeout_seconds=SECONDS),
    "view_chunks": lambda client, _: client.view_chunks([KEY, "other"], timeout_seconds=SECONDS),
    "mget": lambda client, _: next(client.mget([KEY], timeout_seconds=SECONDS)),
    "put_chunk": lambda client, _: client.put_chunk("new", BODY, timeout_seconds=SECONDS),
    "put_part": lambda client, _: client.put_part("new", BODY, part=(0, 2), namespace=DEFAULT, timeout_seconds=SECONDS),
    "mput": lambda client, _: client.mput([NewChunk("new", BODY)], timeout_seconds=SECONDS),
    "match": lambda client, _: client.match(ids=[KEY], timeout_seconds=SECONDS),
    "Session.match": lambda _, session: session.match(ids=[KEY], timeout_seconds=SECONDS),
}


def _raised(answers: Sequence[object]) -> None:
    assert isinstance(answers[0], KvobjError)
    raise answers[0]


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with kv_server(module_paths.mktemp("deadline")) as running:
        with client_of(running) as client:
            client.put_chunk(KEY, BODY)
        yield running


@pytest.mark.parametrize("is_warm", [True, False], ids=["connected before", "a new client"])
@pytest.mark.parametrize("name", CALLS)
def test_a_server_that_hangs_costs_a_call_its_deadline_once(
    server: ServerProcess,
    name: str,
    is_warm: bool,  # noqa: FBT001
) -> None:
    with client_of(server, timeout_seconds=SECONDS) as client:
        if is_warm:
            assert bytes_of(client.get_chunk(KEY)) == BODY
            assert client.is_same_host
        with server.hanging():
            began = time.monotonic()
            with pytest.raises(UnavailableError):
                CALLS[name](client)
            assert time.monotonic() - began < 1.7 * SECONDS, "both ways had the whole deadline each"


@pytest.mark.parametrize("same_host", [True, False], ids=["same host", "http"])
@pytest.mark.parametrize("name", BOUNDED)
def test_a_deadline_of_a_call_is_kept_where_the_client_has_a_longer_one(
    server: ServerProcess,
    name: str,
    same_host: bool,  # noqa: FBT001
) -> None:
    with (
        KvClient(server.endpoint, credentials_of(server), BUCKET, timeout_seconds=60, same_host=same_host) as client,
        Session(client, is_automatic=False) as session,
        server.hanging(),
    ):
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            BOUNDED[name](client, session)
        assert time.monotonic() - began < 1.7 * SECONDS


def test_a_deadline_of_an_awaited_call_is_kept_where_the_client_has_a_longer_one(server: ServerProcess) -> None:
    async def main() -> float:
        async with (
            AsyncKvClient(server.endpoint, credentials_of(server), BUCKET, timeout_seconds=60) as client,
            AsyncSession(client, is_automatic=False) as session,
        ):
            with server.hanging():
                began = time.monotonic()
                raised = await asyncio.gather(
                    client.put_chunk("new", BODY, timeout_seconds=SECONDS),
                    client.mput([NewChunk("new", BODY)], timeout_seconds=SECONDS),
                    client.get_chunks([KEY], [memoryview(bytearray(MIB))], timeout_seconds=SECONDS),
                    client.match(ids=[KEY], timeout_seconds=SECONDS),
                    session.match(ids=[KEY], timeout_seconds=SECONDS),
                    return_exceptions=True,
                )
                assert [type(each) for each in raised if not isinstance(each, UnavailableError)] == []
                return time.monotonic() - began

    assert asyncio.run(main()) < 1.7 * SECONDS


def test_calls_that_are_cancelled_leave_the_same_host_path_in_use(tmp_path: Path) -> None:
    async def cancel_many(running: ServerProcess, client: AsyncKvClient) -> None:
        assert bytes_of(await client.get_chunk(KEY)) == BODY
        # So that each is cancelled while it waits, the first on a connection, those after it for one.
        with running.hanging():
            for _ in range(6):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await client.get_chunk(KEY)
        before = client.same_host_fallbacks
        assert bytes_of(await client.get_chunk(KEY)) == BODY
        assert client.same_host_fallbacks == before, "the path rests as if the server had been gone"
        assert client.is_same_host

    async def main(running: ServerProcess) -> None:
        async with AsyncKvClient(running.endpoint, credentials_of(running), BUCKET) as client:
            await cancel_many(running, client)

    with kv_server(tmp_path) as running:
        with client_of(running) as client:
            client.put_chunk(KEY, BODY)
        asyncio.run(main(running))


def test_calls_that_wait_for_others_to_store_end_when_they_are_cancelled(server: ServerProcess) -> None:
    async def main() -> None:
        async with AsyncKvClient(server.endpoint, credentials_of(server), BUCKET, connections=9) as client:
            await client.put_chunk("stored", BODY)
            assert client.is_same_host
            with server.hanging():
                read = asyncio.create_task(client.get_chunk(KEY, timeout_seconds=10))
                stores = [asyncio.create_task(client.put_chunk(f"waits-{number}", BODY)) for number in range(8)]
                await asyncio.sleep(0)
                for each in reversed(stores):  # the last wait for those before them
                    each.cancel()
                    await asyncio.wait([each])
                    assert each.cancelled()
                assert not read.done(), "one of them had its whole timeout"
                read.cancel()
                await asyncio.wait([read])

    asyncio.run(main())


@pytest.mark.parametrize("same_host", [True, False], ids=["same host", "http"])
def test_for_ever_is_a_timeout_and_what_is_no_number_is_none(server: ServerProcess, same_host: bool) -> None:  # noqa: FBT001
    keys = credentials_of(server)
    with KvClient(server.endpoint, keys, BUCKET, timeout_seconds=math.inf, same_host=same_host) as client:
        assert bytes_of(client.get_chunk(KEY)) == BODY
        assert bytes_of(client.get_chunk(KEY, into=bytearray(MIB), timeout_seconds=1e30)) == BODY
        assert [bytes_of(item.data) for item in client.mget([KEY], timeout_seconds=math.inf)] == [BODY]
        assert b"".join(client.follow_chunk(KEY, timeout_seconds=math.inf)) == BODY
        with pytest.raises(InvalidRequestError):
            client.get_chunk(KEY, timeout_seconds=math.nan)
        with pytest.raises(InvalidRequestError):
            client.follow_chunk("absent", wait_seconds=math.nan)
    with pytest.raises(InvalidRequestError):
        KvClient(server.endpoint, keys, BUCKET, timeout_seconds=math.nan)


def test_whether_bytes_go_by_shared_memory_is_told_without_waiting_for_a_server_that_hangs(
    server: ServerProcess,
) -> None:
    async def main() -> float:
        async with AsyncKvClient(server.endpoint, credentials_of(server), BUCKET) as client:
            assert not client.is_same_host, "nothing is known yet"
            assert bytes_of(await client.get_chunk(KEY)) == BODY
            assert client.is_same_host
        async with AsyncKvClient(server.endpoint, credentials_of(server), BUCKET) as client:
            with server.hanging():
                began = time.monotonic()
                assert not client.is_same_host
                return time.monotonic() - began

    assert asyncio.run(main()) < SECONDS, "an event loop stood still"


def test_rests_after_calls_that_had_no_time_do_not_double(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []

    def late(_: float) -> GrantAnswer:
        asked.append(now[0])
        raise UnavailableError("the deadline has passed")

    monkeypatch.setattr("kvobj.client.same_host.time", SimpleNamespace(monotonic=lambda: now[0]))
    path = SameHost(late, lambda _: None, timeout_seconds=30)
    for _ in range(8):
        assert path.open(["a"], timeout_seconds=0.01) is None
        now[0] += REST_SECONDS
    assert len(asked) == 8, "half a second after each it is tried again"
    for _ in range(8):
        assert path.open(["a"]) is None
        now[0] += REST_SECONDS
    assert len(asked) == 8 + 4, "a server that had its time is asked less and less: after 0.5, 1 and 2 s"


@pytest.mark.parametrize(
    ("error", "is_no"),
    [
        (BusyError("too many grants are not used yet"), False),
        (CorruptionError("500"), False),
        (UnavailableError("nobody answers"), False),
        (AccessDeniedError("the memory is shared with others"), True),
    ],
    ids=["busy", "failed", "away", "refused"],
)
def test_only_a_server_that_says_no_is_taken_to_have_refused_the_same_host_path(error: KvobjError, is_no: bool) -> None:  # noqa: FBT001
    def refuse(_: float) -> GrantAnswer:
        raise error

    path = SameHost(refuse, lambda _: None, timeout_seconds=5)
    assert path.open(["a"]) is None
    path.open(["a"])
    assert (path.fallbacks == 0) is is_no, "a call that goes over HTTP for good is none that fell back"
