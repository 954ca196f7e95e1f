"""The program is replaced under a running server: workers of the new version do not speak with a store process of the old one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import msgspec
import pytest
import server_process
from server_process import ServerProcess, wait_until
from worker_server import is_ready, kill_all_workers, wait_for_workers, worker_server, workers_of

from kvobj.workers.wire import agreement

CALLS = "kvobj/workers/calls.py"
MARK = "class StoreCalls:\n"
ADDED = '    async def added(self, number: int) -> int:\n        """New."""\n        raise NotImplementedError\n\n'


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the program, which servers of the test run from."""
    tree = tmp_path / "program"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(server_process.REPOSITORY / "kvobj", tree / "kvobj", ignore=ignored)
    monkeypatch.setattr(server_process, "REPOSITORY", tree)
    monkeypatch.setenv("PYTHONPATH", str(tree))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # a file that changes twice in a second is read anew
    return tree


@pytest.fixture
def server(program: Path) -> Iterator[ServerProcess]:
    with worker_server(program.with_name("server")) as running:
        yield running


def test_workers_of_another_version_do_not_serve_and_the_server_says_to_restart_it(
    server: ServerProcess, program: Path
) -> None:
    old = (program / CALLS).read_text()
    (program / CALLS).write_text(old.replace(MARK, MARK + ADDED))
    victims = kill_all_workers(server)

    def is_told() -> bool:
        notes = server.status()["notes"]
        return any("another version of kvobj" in note and "restart the server" in note for note in notes)

    wait_until(is_told, timeout_seconds=30, what="a note")
    wait_until(lambda: not is_ready(server), timeout_seconds=30, what="no worker to count as serving")
    assert not server.status()["is_ready"]
    assert {worker["last_end"].partition(":")[0] for worker in workers_of(server)} <= {"status 3", "SIGKILL"}
    log = server.log_path.read_text()
    assert "is of another version of kvobj than its store process" in log
    assert "Traceback" not in log
    (program / CALLS).write_text(old)
    wait_for_workers(server, without=victims)
    assert is_ready(server)
    assert server.status()["is_ready"]
    with server.raw() as raw:
        assert raw.request("PUT", "/cache/again", b"body").status == 200
    assert not any("another version" in note for note in server.status()["notes"])


class Colour(Enum):
    RED = "red"


class Inner(msgspec.Struct, array_like=True):
    one: int


class Message(msgspec.Struct):
    inner: list[Inner] | None


class Calls:
    async def ask(self, message: Message, colour: Colour) -> int:
        """A question."""
        raise NotImplementedError


def of(interface: type, message: type = Message, version: str = "1") -> bytes:
    return agreement(version, (interface,), message)


def test_programs_agree_where_version_methods_and_values_are_the_same() -> None:
    class Same:
        async def ask(self, message: Message, colour: Colour) -> int:
            """In other words."""
            raise NotImplementedError

    Same.__name__ = "Calls"
    assert of(Calls) == of(Same)
    assert of(Calls) != of(Calls, version="2")


def test_programs_disagree_about_another_parameter_another_result_another_order_and_one_method_more() -> None:
    class Parameter:
        async def ask(self, message: Message, color: Colour) -> int:
            raise NotImplementedError

    class Result:
        async def ask(self, message: Message, colour: Colour) -> str:
            raise NotImplementedError

    class More:
        async def ask(self, message: Message, colour: Colour) -> int:
            raise NotImplementedError

        def tell(self) -> None:
            raise NotImplementedError

    class Order:
        def tell(self) -> None:
            raise NotImplementedError

        async def ask(self, message: Message, colour: Colour) -> int:
            raise NotImplementedError

    for each in (Parameter, Result, More, Order):
        each.__name__ = "Calls"
    assert len({of(each) for each in (Calls, Parameter, Result, More, Order)}) == 5


@pytest.mark.parametrize("where", ["of a call", "of the message"])
def test_programs_disagree_about_a_field_deep_within_a_value(where: str) -> None:
    def digest(*fields: tuple[str, type]) -> bytes:
        inner = msgspec.defstruct("Inner", fields, array_like=True, module="kvobj.inner")
        outer = msgspec.defstruct("Outer", [("inner", list[inner] | None)], module="kvobj.outer")  # type: ignore[valid-type]
        if where == "of the message":
            return of(Calls, outer)

        class Asks:
            async def ask(self, given: int) -> None:
                raise NotImplementedError

        Asks.ask.__annotations__["given"] = dict[str, outer]  # type: ignore[valid-type]
        return of(Asks)

    same = digest(("one", int))
    assert digest(("one", int)) == same
    assert digest(("one", str)) != same
    assert digest(("two", int)) != same
    assert digest(("one", int), ("two", int)) != same
