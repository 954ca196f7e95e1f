"""Views of many chunks by one question (`KvClient.view_chunks`): each by itself from then on, and HTTP for what cannot be shown."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from module_paths import ModulePaths
from same_host_world import client_of, payload, settings, wait_for_nothing_held, wait_for_pinned
from server_process import MIB, ServerProcess

from kvobj.client import KvClient, NewChunk
from kvobj.same_host.messages import KEYS_MAX
from kvobj.store.extents import extent_bytes


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with ServerProcess(module_paths.mktemp("views"), settings(dram_mib=256)) as running:
        yield running


@pytest.fixture
def root(server: ServerProcess) -> Iterator[KvClient]:
    with client_of(server) as client:
        assert client.is_same_host
        yield client
    wait_for_nothing_held(server)


def fresh() -> str:
    return f"v-{secrets.token_hex(8)}"


@pytest.mark.parametrize("is_near", [True, False], ids=["same host", "over http"])
def test_many_are_viewed_by_one_question_and_released_each_by_itself(
    server: ServerProcess,
    root: KvClient,
    is_near: bool,  # noqa: FBT001
) -> None:
    names = [fresh() for _ in range(5)]
    root.mput([NewChunk(name, payload(name, 5000)) for name in names[:4]])
    with client_of(server, same_host=is_near) as client:
        views = client.view_chunks([names[4], *names])
        assert [view is None for view in views] == [True, *[False] * 4, True]
        held = [view for view in views if view is not None]
        assert {view.is_shared for view in held} == {is_near}
        for count, (name, view) in enumerate(zip(names, held, strict=False)):
            assert view.data == payload(name, 5000)
            assert view.check()
            view.release()
            wait_for_pinned(server, (3 - count) * extent_bytes(5000) if is_near else 0)
        with pytest.raises(ValueError, match="6 names, 2 pins"):
            client.view_chunks([names[4], *names], pins=[b"p" * 16] * 2)
        assert client.view_chunks([]) == []


def test_what_there_is_no_room_to_pin_of_many_views_comes_over_http(root: KvClient) -> None:
    names = [fresh() for _ in range(3)]
    for name in names:
        root.put_chunk(name, payload(name, 30 * MIB))
    views = root.view_chunks(names)  # a client may pin a quarter of 256 MiB
    assert sorted(view.is_shared for view in views if view is not None) == [False, True, True]
    for view, name in zip(views, names, strict=True):
        assert view is not None
        assert view.data == payload(name, 30 * MIB)
        view.release()


def test_more_than_one_question_may_be_of_are_viewed_in_order(root: KvClient) -> None:
    names = [fresh() for _ in range(KEYS_MAX + 3)]
    for start in range(1, len(names), 500):
        root.mput([NewChunk(name, name.encode()) for name in names[start : start + 500]])
    views = root.view_chunks(names)
    assert views[0] is None
    for view, name in zip(views[1:], names[1:], strict=True):
        assert view is not None
        assert view.data == name.encode()
        view.release()
