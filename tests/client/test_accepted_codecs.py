"""`accept` of the client's calls: what is no list of codecs is told at once, and a match finds what a read with it gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from math import inf, nan
from typing import Any

import pytest
from module_paths import ModulePaths
from real_client import async_client_of, credentials_of
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings
from tier_codecs import LAYOUT, TOKENS, lossy, tensor

from kvobj.client import ROOT, KvClient, NewChunk, Session
from kvobj.client.aio import AsyncSession
from kvobj.client.kv_values import Namespace, accepted, bound_text
from kvobj.errors import InvalidRequestError

CHUNKS = 3
CALLS: dict[str, Callable[[KvClient, Any], object]] = {
    "get_stored": lambda client, accept: client.get_stored("a", accept=accept),
    "match": lambda client, accept: client.match(ids=["a"], accept=accept),
    "pin_tails": lambda client, accept: client.pin_tails(bytes(16), ["a"], accept=accept),
    "session.match": lambda client, accept: in_session(client, lambda session: session.match(ids=["a"], accept=accept)),
    "session.pin": lambda client, accept: in_session(client, lambda session: session.pin(["a"], accept=accept)),
}


def in_session(client: KvClient, call: Callable[[Session], object]) -> object:
    with Session(client) as session:
        return call(session)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def server(module_paths: ModulePaths, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    bucket = BucketSetting("cache", kind="kv", durability="memory")
    settings = ServerSettings(dram_bytes=96 * MIB, nvme_bytes=256 * MIB, buckets=(bucket,), workers=request.param)
    with ServerProcess(module_paths.mktemp("accepted"), settings) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KvClient]:
    with KvClient(server.endpoint, credentials_of(server), "cache") as made:
        yield made


@pytest.fixture(scope="module")
def copies(server: ServerProcess) -> dict[str, Namespace]:
    """Namespaces with a chain (`ids_of`) of which lossy copies alone are left."""
    declaration = {"chunk_tokens": TOKENS, "layout": LAYOUT, "ids": "kvobj", "codecs": {"nvme": lossy()}, "lossy": True}
    with KvClient(server.endpoint, credentials_of(server), "cache") as client:
        made = {
            name: client.declare_namespace(name, {**declaration, "model": name})
            for name in ("matched", "pinned", "headed")
        }
        for namespace in made.values():
            put(client, namespace, ids_of(namespace))
    assert server.terminate() == 0  # a clean stop writes down, and forgets, what memory had
    server.start()
    return made


def ids_of(namespace: Namespace) -> list[bytes]:
    return namespace.chunk_ids(range(TOKENS * CHUNKS))


def put(client: KvClient, namespace: Namespace, ids: list[bytes]) -> None:
    chunks = [
        NewChunk(each, tensor(number), parent=ids[number - 1] if number else ROOT) for number, each in enumerate(ids)
    ]
    for outcome in client.mput(chunks, namespace=namespace):
        assert not isinstance(outcome, Exception), outcome


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_list_of_codecs_is_told_before_anything_is_sent(client: KvClient, call: str) -> None:
    for given in ("raw", "eq4", b"raw", bytearray(b"eq4")):
        with pytest.raises(TypeError, match="list of codecs"):
            CALLS[call](client, given)
    for items in ([5], [None], [b"raw"], ["raw, eq4"], [""], ["raw "], ["eq4;max-error"], ["a" * 33]):
        with pytest.raises(TypeError, match="names of codecs"):
            CALLS[call](client, items)


def test_a_task_is_told_the_same(server: ServerProcess) -> None:
    async def told() -> None:
        wrong: Any = "raw"
        async with async_client_of(server) as client:
            with pytest.raises(TypeError, match="list of codecs"):
                await client.get_stored("a", accept=wrong)
            with pytest.raises(TypeError, match="list of codecs"):
                await client.match(ids=["a"], accept=wrong)

    asyncio.run(told())


def test_a_bound_that_no_error_has_is_refused_and_any_other_can_be_written(client: KvClient) -> None:
    for wrong in (inf, -inf, nan, -0.5):
        with pytest.raises(InvalidRequestError, match="max_error"):
            client.get_stored("a", accept=["raw"], max_error=wrong)
    for bound in (0, 0.0, 5e-324, 1e-100, 1e-9, 1 / 3, 1.0, 1e10, 123456789.125, 3.4e38, 1e308):
        assert client.get_stored("a", accept=["eq4", "raw"], max_error=bound) is None
        assert float(bound_text(bound)) >= min(bound, 9e99)
    assert accepted(["eq4;max-error=0.5", "raw"], 0.25) == ["eq4;max-error=0.5", "raw;max-error=2.5e-1"]


def test_a_match_finds_what_a_read_with_the_same_accept_gives(
    server: ServerProcess, copies: dict[str, Namespace]
) -> None:
    namespace = copies["matched"]
    ids = ids_of(namespace)
    codec = lossy()
    with KvClient(server.endpoint, credentials_of(server), "cache") as client:
        assert client.get_chunk(ids[0], namespace=namespace) is None
        found = client.match(namespace=namespace, ids=ids, explain=True)
        assert (found.matched, found.explain and found.explain.reason) == (0, "not-accepted")
        assert client.match(namespace=namespace, tokens=range(TOKENS * CHUNKS)).matched == 0
        copy = client.get_stored(ids[0], namespace=namespace, accept=[codec])
        assert copy is not None
        assert copy.lossy is not None
        for accept, bound in (([codec], None), (["raw", codec], None), (["raw"], 9.0), ([copy.lossy], None)):
            assert client.get_stored(ids[0], namespace=namespace, accept=accept, max_error=bound) is not None
            found = client.match(namespace=namespace, ids=ids[:1], accept=accept, max_error=bound, detail=True)
            assert [chunk.codec for chunk in found.chunks] == [codec], accept
        assert client.match(namespace=namespace, ids=ids, accept=[codec], max_error=1e-9).matched == 0
        put(client, namespace, ids)
        assert client.match(namespace=namespace, ids=ids).matched == CHUNKS
        assert bytes(client.get_chunk(ids[2], namespace=namespace) or b"") == tensor(2)


def test_a_session_pins_what_its_holder_accepts_and_nothing_else(
    server: ServerProcess, copies: dict[str, Namespace]
) -> None:
    namespace = copies["pinned"]
    ids = ids_of(namespace)
    codec = lossy()
    with KvClient(server.endpoint, credentials_of(server), "cache") as client, Session(client) as session:
        assert session.match(namespace=namespace, ids=ids).pin is None
        assert session.pin(ids[-1:], namespace=namespace) == [None]
        found = session.match(namespace=namespace, ids=ids, accept=[codec])
        assert found.answer.matched == CHUNKS
        (tail,) = session.pin(ids[-1:], namespace=namespace, accept=["raw"], max_error=9.0)
        assert tail is not None
        client.close_session(session.id)  # the server forgets it: what is held is pinned again
        session.renew()
        assert session.reclaims == 1
        assert found.pin is not None
        assert found.pin.is_valid
        assert tail.is_valid, "whatever is left of it, it is held"

    async def on_a_loop() -> int:
        async with async_client_of(server) as tasks, AsyncSession(tasks) as held:
            return (await held.match(namespace=namespace, ids=ids, accept=[codec])).answer.matched

    assert asyncio.run(on_a_loop()) == CHUNKS


def test_a_head_and_a_condition_find_what_a_get_would_give(server: ServerProcess, copies: dict[str, Namespace]) -> None:
    namespace = copies["headed"]
    ids = ids_of(namespace)
    path = f"/cache/{namespace.key_of(ids[0])}"

    def statuses(accept: str | None) -> list[int]:
        fields = {} if accept is None else {"x-kvobj-accept": accept}
        asked = [("GET", {}), ("HEAD", {}), ("HEAD", {"range": "bytes=0-9"}), ("GET", {"if-none-match": "*"})]
        with server.raw() as raw:
            found = [raw.request(method, path, headers=fields | more).status for method, more in asked]
            return [*found, raw.request("HEAD", path, query={"layers": "0-1"}, headers=fields).status]

    for accept in (None, "raw", "RAW", "nosuch, raw"):
        assert statuses(accept) == [404] * 5, accept
    with KvClient(server.endpoint, credentials_of(server), "cache") as client:
        put(client, namespace, ids)
    assert statuses(None) == [200, 200, 206, 304, 206]
