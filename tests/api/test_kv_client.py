"""The KV client against a real server: namespaces, chunks, match, batches, events, and sessions that hold what they say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from module_paths import ModulePaths
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings, wait_until

from kvobj.client import (
    ChunkView,
    Credentials,
    Event,
    KvClient,
    Lease,
    Namespace,
    NewChunk,
    Pin,
    S3Client,
    Session,
    SignedConnection,
)
from kvobj.client.call_scope import CallScope
from kvobj.client.connection import Endpoint
from kvobj.client.kv_values import DEFAULT, ROOT, Name, StoredChunk
from kvobj.client.retry import RetryRule
from kvobj.errors import (
    BatchTooLargeError,
    ImmutableChunkError,
    InvalidRequestError,
    LayoutMismatchError,
    NamespaceConflictError,
    NoSuchNamespaceError,
    NoSuchSessionError,
    ParentNotFoundError,
    PinLimitExceededError,
    UnavailableError,
)

CHUNK_TOKENS, LAYERS = 16, 4
CHUNK_BYTES = 2 * LAYERS * 8 * CHUNK_TOKENS * 2
DECLARATION = {
    "model": "m",
    "chunk_tokens": CHUNK_TOKENS,
    "layout": {"kind": "kv", "dtype": "bf16", "layers": LAYERS, "kv_heads": 1, "head_dim": 8},
    "ids": "kvobj",
}
TOKENS = list(range(CHUNK_TOKENS * 6))


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    settings = ServerSettings(
        dram_bytes=96 * MIB, nvme_bytes=256 * MIB, buckets=(BucketSetting("cache", kind="kv", durability="memory"),)
    )
    with ServerProcess(module_paths.mktemp("kv"), settings) as running:
        yield running


def client_of(server: ServerProcess, **options: float) -> KvClient:
    keys = server.credentials()
    connections = int(options.get("connections", 4))
    return KvClient(
        server.endpoint,
        Credentials(keys.access_key, keys.secret_key),
        "cache",
        connections=connections,
        timeout_seconds=options.get("timeout_seconds", 20.0),
        same_host=bool(options.get("same_host", True)),
    )


@pytest.fixture(params=[True, False], ids=["same-host", "http"])
def client(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[KvClient]:
    with client_of(server, same_host=request.param) as made:
        yield made


@pytest.fixture
def namespace(client: KvClient, request: pytest.FixtureRequest) -> Namespace:
    """A namespace of the test's own."""
    return client.declare_namespace(f"n{blake3(request.node.name.encode()).hexdigest(8)}", DECLARATION)


def payload(name: bytes, size_bytes: int = CHUNK_BYTES) -> bytes:
    return blake3(name).digest(length=size_bytes)


def put_chain(client: KvClient, namespace: Namespace, ids: list[bytes]) -> None:
    parent: bytes | str = ROOT
    for chunk_id in ids:
        client.put_chunk(chunk_id, payload(chunk_id), namespace=namespace, parent=parent)
        parent = chunk_id


def delete(server: ServerProcess, namespace: Namespace, name: Name) -> None:
    keys = server.credentials()
    with SignedConnection(Endpoint.parse(server.endpoint), Credentials(keys.access_key, keys.secret_key)) as connection:
        S3Client(connection).delete("cache", namespace.key_of(name))


class TurnedClock:
    """The holder's clock, which a test turns."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# -- namespaces -----------------------------------------------------------------------------------------------------


def test_a_namespace_is_declared_once_and_its_ids_are_the_servers(client: KvClient) -> None:
    declared = client.declare_namespace("llama", DECLARATION)
    assert client.declare_namespace("llama", DECLARATION) == declared
    assert client.namespace("llama").key == declared.key
    assert declared.chunk_bytes == CHUNK_BYTES
    assert "llama" in [each.name for each in client.namespaces()]
    assert declared.key.hex() not in repr(declared)
    ids = declared.chunk_ids(TOKENS)
    put_chain(client, declared, ids)
    assert client.match(namespace=declared, tokens=TOKENS).matched == 6, "the server makes the same ids of the tokens"
    assert client.match(namespace=declared, ids=ids).matched == 6
    assert declared.chunk_ids(TOKENS[: CHUNK_TOKENS * 2], behind=ids[3]) != ids[4:]
    assert declared.chunk_ids(TOKENS[CHUNK_TOKENS * 4 :], behind=ids[3]) == ids[4:]
    assert client.remove_namespace("llama") == 6
    with pytest.raises(NoSuchNamespaceError):
        client.namespace("llama")


def test_another_declaration_is_told_with_what_differs(client: KvClient, namespace: Namespace) -> None:
    with pytest.raises(NamespaceConflictError) as caught:
        client.declare_namespace(namespace.name, DECLARATION | {"model": "another"})
    assert caught.value.data["differs"] == ["model"]


# -- chunks ---------------------------------------------------------------------------------------------------------


def test_chunks_are_put_and_read_into_memory_of_the_callers_own(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    first = client.put_chunk(ids[0], payload(ids[0]), namespace=namespace, parent=ROOT)
    again = client.put_chunk(ids[0], payload(ids[0]), namespace=namespace, parent=ROOT)
    assert (first.existed, again.existed, first.durability) == (False, True, "memory")
    whole = client.get_chunk(ids[0], namespace=namespace)
    assert whole is not None
    assert bytes(whole) == payload(ids[0])
    room = bytearray(CHUNK_BYTES + 100)
    view = client.get_chunk(ids[0], namespace=namespace, into=room)
    assert view is not None
    assert len(view) == CHUNK_BYTES
    assert bytes(room[:CHUNK_BYTES]) == payload(ids[0])
    assert client.get_chunk(ids[1], namespace=namespace) is None
    layers = client.get_chunk(ids[0], namespace=namespace, layers=(1, 2))
    assert layers is not None
    assert bytes(layers) == payload(ids[0])[CHUNK_BYTES // 4 : CHUNK_BYTES * 3 // 4]


def test_too_little_room_is_refused_and_the_client_goes_on(client: KvClient, namespace: Namespace) -> None:
    (first, *_) = namespace.chunk_ids(TOKENS)
    client.put_chunk(first, payload(first), namespace=namespace, parent=ROOT)
    with pytest.raises(InvalidRequestError, match="room"):
        client.get_chunk(first, namespace=namespace, into=bytearray(10))
    assert client.get_chunk(first, namespace=namespace) is not None


def test_refusals_are_typed_and_name_what_is_wrong(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    with pytest.raises(ParentNotFoundError) as caught:
        client.put_chunk(ids[1], payload(ids[1]), namespace=namespace, parent=ids[0])
    assert caught.value.data["parent"] == ids[0].hex()
    with pytest.raises(LayoutMismatchError) as refused:
        client.put_chunk(ids[0], b"short", namespace=namespace, parent=ROOT)
    assert refused.value.data["differs"]
    client.put_chunk("key", b"one")
    with pytest.raises(ImmutableChunkError):
        client.put_chunk("key", b"other")
    with pytest.raises(BatchTooLargeError):
        client.match(namespace=namespace, ids=ids[:1] * 65_537)
    assert client.match(namespace=namespace, ids=ids).matched == 0


def test_foreign_keys_with_parents_are_chains_of_their_own_namespace(client: KvClient) -> None:
    foreign = client.declare_namespace("foreign", DECLARATION | {"ids": "foreign"})
    keys = [f"block/{number}" for number in range(4)]
    parent = ROOT
    for key in keys:
        client.put_chunk(key, payload(key.encode()), namespace=foreign, parent=parent)
        parent = key
    found = client.match(namespace=foreign, ids=[*keys, "block/4"], detail=True)
    assert found.matched == 4
    assert [chunk.id for chunk in found.chunks] == keys
    assert client.match(namespace=foreign, ids=[keys[0], keys[2]]).matched == 1, "the second has another parent"
    assert client.match(ids=keys).matched == 0, "not in the namespace default"


def test_a_match_tells_sizes_tiers_and_why_it_ends(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids[:2])
    found = client.match(namespace=namespace, ids=ids, detail=True, explain=True, output_tokens=100)
    assert (found.matched, found.tokens, found.size_bytes) == (2, 2 * CHUNK_TOKENS, 2 * CHUNK_BYTES)
    assert [(chunk.id, chunk.size_bytes, chunk.tier) for chunk in found.chunks] == [
        (chunk_id, CHUNK_BYTES, "dram") for chunk_id in ids[:2]
    ]
    assert [chunk.digest for chunk in found.chunks] == [blake3(payload(each)).digest() for each in ids[:2]]
    assert found.explain is not None
    assert (found.explain.at, found.explain.reason) == (2, "never-stored")


# -- many at once ---------------------------------------------------------------------------------------------------


def test_a_batch_is_put_in_one_step_and_read_in_one_stream(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    parents: list[bytes | str] = [ROOT, *ids]
    chunks = [
        NewChunk(each, payload(each), parent=parent, digest=blake3(payload(each)).digest())
        for each, parent in zip(ids[:4], parents[:4], strict=True)
    ]
    stored = client.mput(chunks, namespace=namespace)
    assert [each.existed for each in stored if isinstance(each, StoredChunk)] == [False] * 4
    again = client.mput([*chunks, NewChunk(ids[5], payload(ids[5]), parent=ids[4])], namespace=namespace)
    assert [each.existed for each in again[:4] if isinstance(each, StoredChunk)] == [True] * 4
    assert isinstance(again[4], ParentNotFoundError)
    read = list(client.mget(ids, namespace=namespace))
    assert [None if each.data is None else bytes(each.data) for each in read] == [
        *(payload(each) for each in ids[:4]),
        None,
        None,
    ]
    room = bytearray(4 * CHUNK_BYTES)

    def into(index: int, layer: int | None, size_bytes: int) -> memoryview:
        assert layer is not None
        start = layer * CHUNK_BYTES + index * size_bytes
        return memoryview(room)[start : start + size_bytes]

    items = list(client.mget(ids[:4], namespace=namespace, layer_order=True, into=into))
    assert [(each.layer, each.index) for each in items] == [(layer, index) for layer in range(4) for index in range(4)]
    part = CHUNK_BYTES // LAYERS
    assert bytes(room[:part]) == payload(ids[0])[:part]
    assert bytes(room[CHUNK_BYTES : CHUNK_BYTES + part]) == payload(ids[0])[part : 2 * part]


def test_a_stream_left_early_costs_the_connection_and_nothing_else(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    for _ in range(6):
        stream = client.mget(ids, namespace=namespace)
        assert next(iter(stream)).index == 0
        stream.close()  # type: ignore[attr-defined]  # a generator
    assert len(list(client.mget(ids, namespace=namespace))) == 6


def test_events_tell_what_was_stored_from_a_number_on(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids[:2])
    seen = [event for event in client.events() if event.namespace == namespace.name]
    assert [(event.type, event.ids) for event in seen] == [("stored", [ids[0].hex()]), ("stored", [ids[1].hex()])]
    assert seen[0].parent == ROOT
    following: list[Event] = []
    later = threading.Thread(
        target=lambda: following.append(next(client.events(after=seen[-1].seq, follow=True))), daemon=True
    )
    later.start()
    client.put_chunk(ids[2], payload(ids[2]), namespace=namespace, parent=ids[1])
    later.join(10)
    assert [event.ids for event in following] == [[ids[2].hex()]]


def test_a_reader_whose_number_is_none_of_the_logs_is_told_of_the_gap(client: KvClient) -> None:
    (gap,) = client.events(after=10**15)
    assert (gap.type, gap.first) == ("gap", 1)
    assert gap.last >= 1


def shown(views: Sequence[ChunkView | None]) -> list[bytes | None]:
    """What views show, each of which is released."""
    seen: list[bytes | None] = []
    for view in views:
        seen.append(None if view is None else bytes(view.data))
        if view is not None:
            view.release()
    return seen


# -- sessions -------------------------------------------------------------------------------------------------------


def test_a_pinned_chain_is_read_even_after_a_delete(
    server: ServerProcess, client: KvClient, namespace: Namespace
) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    with Session(client, holder="decode-1", ttl_ms=5000) as session:
        found = session.match(namespace=namespace, ids=ids)
        assert found.answer.matched == 6
        pin = held(found.pin)
        delete(server, namespace, ids[0])
        assert client.match(namespace=namespace, ids=ids).matched == 0
        assert client.get_chunk(ids[2], namespace=namespace) is None
        for chunk_id in ids:
            data = session.read(pin, chunk_id)
            assert data is not None
            assert bytes(data) == payload(chunk_id)
        many = list(session.read_many(pin, ids))
        assert [None if each.data is None else bytes(each.data) for each in many] == [payload(each) for each in ids]
        assert shown(session.view_many(pin, ids)) == [payload(each) for each in ids]
        assert shown(client.view_chunks(ids, namespace=namespace)) == [None] * 6
    assert not pin.is_valid
    assert session.read(pin, ids[0]) is None
    assert session.view_many(pin, ids) == [None] * 6


def test_what_a_pin_does_not_hold_is_a_miss_however_it_is_read(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids[:3])
    with Session(client) as session:
        found = session.match(namespace=namespace, tokens=TOKENS)
        pin = held(found.pin)
        assert found.answer.matched == 3
        assert session.read(pin, ids[3]) is None
        assert session.view(pin, ids[3]) is None
        assert shown(session.view_many(pin, ids)) == [*(payload(each) for each in ids[:3]), None, None, None]
        read = [(each.index, None if each.data is None else bytes(each.data)) for each in session.read_many(pin, ids)]
        assert read == list(enumerate([*(payload(each) for each in ids[:3]), None, None, None]))
        assert pin.is_valid


@pytest.mark.parametrize("same_host", [True, False], ids=["same-host", "http"])
def test_one_connection_is_enough_to_read_what_deletes_have_hidden_here_and_there(
    server: ServerProcess,
    same_host: bool,  # noqa: FBT001
) -> None:
    keys = [f"hidden/{same_host}/{number}" for number in range(8)]
    rooms: list[int] = []

    def room(index: int, _layer: int | None, _size_bytes: int) -> None:
        rooms.append(index)

    with client_of(server, connections=1, timeout_seconds=5, same_host=same_host) as client:
        client.mput([NewChunk(key, payload(key.encode())) for key in keys])
        with Session(client) as session:
            pin = held(session.match(ids=keys).pin)
            for number in (0, 2, 3, 6, 7):
                delete(server, DEFAULT, keys[number])
            read = [
                (each.index, None if each.data is None else bytes(each.data))
                for each in session.read_many(pin, [*keys, "none of these"], into=room)
            ]
            assert read == list(enumerate([*(payload(key.encode()) for key in keys), None]))
            assert rooms == [1, 4, 5], "the others come into memory of their own"


def held(pin: Pin | None) -> Pin:
    assert pin is not None
    assert pin.is_valid
    return pin


def test_a_session_renews_itself_releases_in_batches_and_never_needs_to_reclaim(
    server: ServerProcess, client: KvClient, namespace: Namespace
) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    with Session(client, ttl_ms=1000) as session:
        kept = held(session.match(namespace=namespace, ids=ids).pin)
        for _ in range(20):
            held(session.match(namespace=namespace, tokens=TOKENS).pin).release()
        first_id = session.id
        wait_until(lambda: pins_held(server) <= 1, timeout_seconds=5, what="releases to be told")
        deadline = session.now() + 2.0
        wait_until(lambda: session.now() > deadline, timeout_seconds=5, what="two TTLs to pass")
        assert kept.is_valid
        assert session.id == first_id
        assert session.reclaims == 0
    wait_until(lambda: pins_held(server) == 0, timeout_seconds=5, what="the session to be closed")


def pins_held(server: ServerProcess) -> int:
    leases = server.status()["leases"]
    return int(leases["pins"])


def test_a_paused_holder_reads_nothing_after_its_deadline_and_something_again_once_it_renewed(
    client: KvClient, namespace: Namespace
) -> None:
    clock = TurnedClock()
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    with Session(client, ttl_ms=30_000, is_automatic=False, now=clock) as session:
        pin = held(session.match(namespace=namespace, ids=ids).pin)
        clock.now += 29.4
        assert session.read(pin, ids[0]) is not None
        clock.now += 0.2
        assert session.read(pin, ids[0]) is None, "the holder's deadline has passed, whatever the server thinks"
        assert [each.data for each in session.read_many(pin, ids)] == [None] * 6
        session.renew()
        assert session.read(pin, ids[0]) is not None


def test_a_deadline_that_passes_during_a_read_makes_it_a_miss(client: KvClient, namespace: Namespace) -> None:
    clock = TurnedClock()
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    with Session(client, ttl_ms=30_000, is_automatic=False, now=clock) as session:
        pin = held(session.match(namespace=namespace, ids=ids).pin)

        def room(index: int, _layer: int | None, _size_bytes: int) -> None:
            if index == 3:
                clock.now += 60

        read = list(session.read_many(pin, ids, into=room))
        assert [each.data is not None for each in read] == [True, True, True, False, False, False]


def test_a_lost_session_is_opened_anew_and_what_is_held_is_pinned_again(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    foreign_keys = [f"lost/{number}" for number in range(3)]
    put_chain(client, namespace, ids)
    for key in foreign_keys:
        client.put_chunk(key, key.encode())
    with Session(client, is_automatic=False) as session:
        chain = held(session.match(namespace=namespace, ids=ids).pin)
        loose = held(session.match(ids=foreign_keys).pin)
        (single,) = session.pin([ids[2]], namespace=namespace)
        released = held(session.match(namespace=namespace, ids=ids).pin)
        released.release()
        client.close_session(session.id)  # as if the server had lost it
        session.renew()
        assert session.reclaims == 1
        for pin, name in ((chain, ids[5]), (chain, ids[0]), (held(single), ids[2])):
            data = session.read(pin, name)
            assert data is not None
            assert bytes(data) == payload(name)
        for key in foreign_keys:
            data = session.read(loose, key)
            assert data is not None
            assert bytes(data) == key.encode()
        assert not released.is_valid
        session.renew()
        assert session.reclaims == 1, "what is said of the new session's pins is right"


def test_what_is_gone_when_a_session_is_lost_is_never_valid_again(
    server: ServerProcess, client: KvClient, namespace: Namespace
) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    with Session(client, is_automatic=False) as session:
        deep = held(session.match(namespace=namespace, ids=ids).pin)
        shallow = held(session.match(namespace=namespace, ids=ids[:2]).pin)
        client.close_session(session.id)
        delete(server, namespace, ids[3])
        session.renew()
        assert not deep.is_valid
        assert session.read(deep, ids[0]) is None
        assert session.read(held(shallow), ids[1]) is not None


def test_a_namespace_that_is_gone_when_a_session_is_lost_takes_no_pins_of_others_along(
    client: KvClient, namespace: Namespace
) -> None:
    gone = client.declare_namespace("a-gone", DECLARATION)  # is asked for before the other
    for each in (gone, namespace):
        put_chain(client, each, each.chunk_ids(TOKENS))
    with Session(client, is_automatic=False) as session:
        lost = held(session.match(namespace=gone, tokens=TOKENS).pin)
        kept = held(session.match(namespace=namespace, tokens=TOKENS).pin)
        client.remove_namespace("a-gone")
        client.close_session(session.id)
        session.renew()
        assert not lost.is_valid
        assert session.read(held(kept), namespace.chunk_ids(TOKENS)[5]) is not None
        session.renew()
        assert session.reclaims == 1


def test_what_a_delete_has_hidden_stays_readable_beside_a_new_session_until_the_holder_closes(
    server: ServerProcess, client: KvClient, namespace: Namespace
) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    with Session(client, is_automatic=False) as session:
        client.match(namespace=namespace, ids=ids, session=session.id)  # a grant that the holder does not hear of
        pin = held(session.match(namespace=namespace, ids=ids).pin)
        delete(server, namespace, ids[5])
        session.renew()
        session.renew()
        assert session.reclaims == 1
        assert session.read(held(pin), ids[5]) is not None
    assert not pin.is_valid
    assert pins_held(server) == 0, "the session before is closed with it"


def test_a_namespace_of_a_list_is_matched_by_tokens_and_its_pins_are_let_go_of(
    server: ServerProcess, client: KvClient, namespace: Namespace
) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    (listed,) = [each for each in client.namespaces() if each.name == namespace.name]
    assert listed.key == b""
    with Session(client, is_automatic=False) as session:
        pin = held(session.match(namespace=listed, tokens=TOKENS).pin)
        assert pin.names == (ids[5],)
        assert session.read(pin, ids[5]) is not None
        pin.release()
        session.renew()
        assert pins_held(server) == 0


def test_a_grant_whose_answer_was_lost_makes_the_holder_pin_its_set_again(
    server: ServerProcess, client: KvClient, namespace: Namespace
) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    with Session(client, is_automatic=False) as session:
        client.match(namespace=namespace, ids=ids, session=session.id)  # granted, and the holder never hears of it
        pin = held(session.match(namespace=namespace, ids=ids).pin)
        before = session.id
        session.renew()
        assert (session.reclaims, session.id != before) == (1, True)
        assert session.read(held(pin), ids[5]) is not None
        assert pins_held(server) == 1, "the old session and the pin that nobody knew are gone"
        session.renew()
        assert session.reclaims == 1


def test_a_match_on_a_lost_session_is_asked_again_under_a_new_one(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    with Session(client, is_automatic=False) as session:
        client.close_session(session.id)
        assert held(session.match(namespace=namespace, ids=ids).pin).is_valid


def test_a_full_session_makes_room_from_what_was_released_or_says_so(client: KvClient) -> None:
    keys = [f"full/{number}" for number in range(1400)]
    for start in range(0, len(keys), 1000):
        client.mput([NewChunk(key, b"x") for key in keys[start : start + 1000]])
    with Session(client, is_automatic=False) as session:
        first = [held(session.match(ids=keys).pin) for _ in range(2)]
        with pytest.raises(PinLimitExceededError):
            session.match(ids=keys)
        first[0].release()
        assert held(session.match(ids=keys).pin).is_valid


def test_a_closed_session_grants_nothing(client: KvClient) -> None:
    with Session(client) as session:
        pass
    with pytest.raises(NoSuchSessionError):
        session.match(ids=["a"])
    session.close()


# -- connections ----------------------------------------------------------------------------------------------------


def test_threads_share_a_client(client: KvClient, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    put_chain(client, namespace, ids)
    wrong: list[bytes] = []

    def read() -> None:
        for _ in range(20):
            for chunk_id in ids:
                data = client.get_chunk(chunk_id, namespace=namespace)
                if data is None or bytes(data) != payload(chunk_id):
                    wrong.append(chunk_id)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_session_is_renewed_while_reads_have_all_connections(server: ServerProcess, namespace: Namespace) -> None:
    ids = namespace.chunk_ids(TOKENS)
    with client_of(server, connections=1, same_host=False) as small:
        put_chain(small, namespace, ids)
        with Session(small, is_automatic=False) as session:
            pin = held(session.match(namespace=namespace, ids=ids).pin)
            stream = session.read_many(pin, ids)
            assert next(stream).data is not None
            with pytest.raises(UnavailableError), CallScope(time.monotonic() + 0.2).entered():
                small.match(namespace=namespace, ids=ids)
            session.renew()
            assert len(list(stream)) == 5


def test_a_server_that_is_away_is_a_typed_error_within_the_deadline(server: ServerProcess) -> None:
    keys = server.credentials()
    nobody = Endpoint(is_tls=False, host="127.0.0.1", port=1)
    credentials = Credentials(keys.access_key, keys.secret_key)
    with (
        KvClient(nobody, credentials, "cache", timeout_seconds=5, retry=RetryRule(tries=2)) as client,
        pytest.raises(UnavailableError),
    ):
        client.match(ids=["a"])


def test_a_session_outlives_a_restart_of_the_server(tmp_path: Path) -> None:
    settings = ServerSettings(
        dram_bytes=64 * MIB, nvme_bytes=256 * MIB, buckets=(BucketSetting("cache", kind="kv", durability="memory"),)
    )
    with ServerProcess(tmp_path, settings) as server, client_of(server) as client:
        namespace = client.declare_namespace("llama", DECLARATION)
        ids = namespace.chunk_ids(TOKENS)
        put_chain(client, namespace, ids)
        with Session(client, ttl_ms=30_000) as session:
            pin = held(session.match(namespace=namespace, ids=ids).pin)
            before = session.id
            server.kill()
            server.start()
            session.renew()
            assert session.id == before, "sessions survive the process"
            data = session.read(held(pin), ids[5])
            assert data is not None
            assert bytes(data) == payload(ids[5])


def test_a_lease_is_part_of_what_clients_import() -> None:
    assert not Lease().is_valid(0.0)
