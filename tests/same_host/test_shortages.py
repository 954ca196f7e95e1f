"""Clients whose process can have no descriptor or no thread any more: HTTP or a typed error, and all is as before afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from module_paths import ModulePaths
from same_host_world import client_of, no_descriptors_left, payload, settings, wait_for_nothing_held
from server_process import MIB, ServerProcess, wait_until

from kvobj.buffers import address_of
from kvobj.client import KvClient
from kvobj.client.same_host_lane import GrantAnswer, Lane
from kvobj.errors import UnavailableError
from kvobj.same_host.copying import HELPED_BYTES, Copiers, Piece
from kvobj.same_host.descriptors import staging_memory
from kvobj.same_host.mapping import Mapping
from kvobj.same_host.touching import Toucher

SIZE = 3 * MIB


@contextmanager
def no_threads_to_be_had() -> Iterator[None]:
    """The kernel has no address space for the stack of another."""
    threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(0)


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("shortages"), settings()) as running:
        with client_of(running, same_host=False) as client:
            client.put_chunk("k", payload("k", SIZE))
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[KvClient]:
    """One whose connections for HTTP are kept, and whose same-host path is to be connected, and to have its thread."""
    with client_of(server) as client:
        path = client._same_host
        path._rest_until = float("inf")
        assert client.match(ids=["k"]).matched == 1
        client._grant(10.0)
        path._rest_until, path.fallbacks = 0.0, 0
        yield client
    wait_for_nothing_held(server)


def viewed(client: KvClient) -> bytes:
    view = client.view_chunk("k")
    assert view is not None
    with view:
        assert not view.is_shared
        return bytes(view.data)


READS: dict[str, Callable[[KvClient], bytes | memoryview | None]] = {
    "get_chunk": lambda client: client.get_chunk("k"),
    "view_chunk": viewed,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("shortage", [no_descriptors_left, no_threads_to_be_had])
def test_what_cannot_be_connected_to_the_same_host_path_goes_over_http(
    client: KvClient, shortage: Callable[[], AbstractContextManager[None]], read: str
) -> None:
    path = client._same_host
    with shortage():
        assert READS[read](client) == payload("k", SIZE)
        assert not path._lanes
        assert path.fallbacks == 1
    path._rest_until = 0.0  # as if the rest were over
    assert client.is_same_host
    assert client.get_chunk("k") == payload("k", SIZE)


def test_no_descriptor_for_the_socket_is_a_typed_error() -> None:
    grant = GrantAnswer("/nowhere/kvobj.sock", b"id", b"token", 1000)
    with no_descriptors_left(), pytest.raises(UnavailableError, match="no same-host socket"):
        Lane.connect(grant, deadline=float("inf"))


@pytest.fixture
def mapping() -> Iterator[Mapping]:
    descriptor = staging_memory(4 * HELPED_BYTES)
    try:
        yield Mapping(descriptor, 4 * HELPED_BYTES, is_writable=True)
    finally:
        os.close(descriptor)


def test_pages_for_which_there_was_no_thread_are_made_ready_with_the_next(mapping: Mapping) -> None:
    toucher = Toucher()
    with no_threads_to_be_had():
        toucher.add(mapping)
    assert not mapping.is_touched(0, mapping.size_bytes)
    descriptor = staging_memory(4096)
    another = Mapping(descriptor, 4096, is_writable=True)
    os.close(descriptor)
    toucher.add(another)
    for each in (mapping, another):
        wait_until(lambda each=each: each.is_touched(0, each.size_bytes), timeout_seconds=10, what="its pages")  # type: ignore[misc]


def test_a_copy_for_which_there_is_no_helper_is_made_without_and_the_next_has_them(mapping: Mapping) -> None:
    content = os.urandom(mapping.size_bytes)
    copiers = Copiers(2)

    def copied() -> memoryview:
        room = memoryview(bytearray(mapping.size_bytes))
        copiers.copy_all([Piece(address_of(room), mapping.address(0), mapping.size_bytes, mapping, 0)])
        return room

    mapping.room[:] = content
    with no_threads_to_be_had():
        assert copied() == content
    assert not copiers._helpers
    assert copiers._jobs.empty(), "what waits for a helper keeps the memory"
    assert copied() == content
    assert len(copiers._helpers) == 2
