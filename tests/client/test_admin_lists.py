"""Lists of an admin port that come page by page: to their end, and no further where they do not go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
from scripted_server import ScriptedServer, answering, ok

from kvobj.client import AdminClient
from kvobj.errors import UnavailableError

Document = dict[str, object]

LISTS: dict[str, Callable[[AdminClient], Iterable[Document]]] = {
    "objects": lambda admin: admin.objects("cache"),
    "namespaces": lambda admin: admin.namespaces("cache"),
}


def page(name: str, number: int, next_after: str | None) -> bytes:
    return ok(json.dumps({name: [{"number": number}], "next_after": next_after}).encode())


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_asked_for_to_its_end(name: str) -> None:
    pages = [page(name, 1, "a"), page(name, 2, "b"), page(name, 3, None)]
    with ScriptedServer(answering(*pages)) as server, server.connection() as connection:
        assert [each["number"] for each in LISTS[name](AdminClient(connection))] == [1, 2, 3]


@pytest.mark.parametrize("again", ["b", "a", ""], ids=["the same", "one before", "the beginning"])
@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_does_not_go_on_is_no_list(name: str, again: str) -> None:
    came: list[object] = []
    pages = [page(name, 1, "b"), page(name, 2, again), page(name, 3, None)]
    with (
        ScriptedServer(answering(*pages)) as server,
        server.connection() as connection,
        pytest.raises(UnavailableError, match="does not go on"),
    ):
        came.extend(each["number"] for each in LISTS[name](AdminClient(connection)))
    assert came in ([], [1, 2]), "a page that comes again was asked for"
