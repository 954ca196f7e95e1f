"""Which sockets a server listens on: those that were passed to it, by systemd's protocol, and its own for the rest."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

import pytest

from kvobj.app import listening
from kvobj.app.listening import Listeners, address_of, passed_on
from kvobj.config import ServerSettings, Settings
from kvobj.config.settings import AdminSettings, ListenAddress
from kvobj.errors import ConfigurationError

PLACE = 900
ANYWHERE = ListenAddress("127.0.0.1", 0)
SETTINGS = Settings(server=ServerSettings(listen=ANYWHERE), admin=AdminSettings(listen=ANYWHERE))


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[int]]]:
    """Puts sockets where a server looks for them; the ports they listen on."""
    monkeypatch.setattr(listening, "FIRST_PASSED", PLACE)
    with ExitStack() as stack:

        def put(*sockets: socket.socket | int) -> list[int]:
            made = [
                stack.enter_context(socket.create_server(("127.0.0.1", 0)) if isinstance(each, int) else each)
                for each in sockets
            ]
            for number, each in enumerate(made, PLACE):
                os.dup2(each.fileno(), number)
            return [each.getsockname()[1] for each in made]

        yield put


def variables(count: int, **more: str) -> Mapping[str, str]:
    return {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(count), **more}


def ports(environment: Mapping[str, str]) -> tuple[list[int], int]:
    """Those for S3 and that of the admin port."""
    listeners = Listeners.open(SETTINGS, environment)
    try:
        for each in (*listeners.s3, listeners.admin):
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            assert not each.get_inheritable()
        return [address_of(each).port for each in listeners.s3], address_of(listeners.admin).port
    finally:
        listeners.close()


@pytest.mark.parametrize("names", [{}, {"LISTEN_FDNAMES": ""}, {"LISTEN_FDNAMES": "kvobj.socket:kvobj.socket"}])
def test_without_names_the_first_is_for_s3_and_the_second_for_the_admin_port(
    passed: Callable[..., list[int]], names: Mapping[str, str]
) -> None:
    first, second = passed(1, 2)
    assert ports(variables(2, **names)) == ([first], second)


def test_names_win_over_the_order_and_s3_may_have_several(passed: Callable[..., list[int]]) -> None:
    first, second, third = passed(1, 2, 3)
    assert ports(variables(3, LISTEN_FDNAMES="s3:admin:s3")) == ([first, third], second)


def test_what_is_not_passed_is_bound(passed: Callable[..., list[int]]) -> None:
    (only,) = passed(1)
    s3, admin = ports(variables(1))
    assert s3 == [only]
    assert admin not in {0, only}
    (only,) = passed(1)
    s3, admin = ports(variables(1, LISTEN_FDNAMES="admin"))
    assert admin == only
    assert s3[0] not in {0, only}


def test_sockets_of_another_process_are_left_alone(passed: Callable[..., list[int]]) -> None:
    (other,) = passed(1)
    s3, admin = ports({"LISTEN_PID": str(os.getppid()), "LISTEN_FDS": "1"})
    assert other not in {*s3, admin}
    os.fstat(PLACE)  # still open
    os.close(PLACE)


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (variables(1, LISTEN_FDNAMES="s3:admin"), "LISTEN_FDNAMES: must name 1 sockets"),
        (variables(2, LISTEN_FDNAMES="s3:other"), "LISTEN_FDNAMES: must name 2 sockets"),
        (variables(2, LISTEN_FDNAMES="admin:admin"), "LISTEN_FDNAMES: must name 2 sockets"),
        (variables(3), "LISTEN_FDNAMES: 3 sockets need names"),
        ({**variables(0), "LISTEN_FDS": "many"}, "LISTEN_FDS: is not a number: 'many'"),
        (variables(1), f"LISTEN_FDS: descriptor {PLACE} (s3): Bad file descriptor"),
    ],
)
def test_what_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], problem: str
) -> None:
    monkeypatch.setattr(listening, "FIRST_PASSED", PLACE)
    with pytest.raises(ConfigurationError) as refused:
        Listeners.open(SETTINGS, environment)
    (told,) = refused.value.problems
    assert told.startswith(problem)


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_what_does_not_listen_is_refused_and_what_came_before_it_is_closed(
    passed: Callable[..., list[int]], kind: socket.SocketKind
) -> None:
    passed(1, socket.socket(socket.AF_INET, kind))
    with pytest.raises(ConfigurationError, match=rf"descriptor {PLACE + 1} \(admin\): is no listening TCP socket"):
        Listeners.open(SETTINGS, variables(2))
    for number in (PLACE, PLACE + 1):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def test_a_port_in_use_is_named_and_nothing_stays_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy = ListenAddress("127.0.0.1", other.getsockname()[1])
        settings = Settings(server=ServerSettings(listen=ANYWHERE), admin=AdminSettings(listen=busy))
        with pytest.raises(ConfigurationError, match=rf"admin.listen: cannot listen on {busy}: Address already in use"):
            Listeners.open(settings, {})


def test_what_a_holder_passes_on_is_what_a_server_takes_over(passed: Callable[..., list[int]]) -> None:
    held = Listeners.open(SETTINGS, {})
    try:
        passed(held.s3[0], held.admin)
        expected = [address_of(held.s3[0]).port], address_of(held.admin).port
        assert ports(passed_on(held, os.getpid())) == expected
    finally:
        held.close()
