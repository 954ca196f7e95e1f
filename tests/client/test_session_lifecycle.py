"""When a session ends that nobody closes: interrupted, cancelled, dropped, or one that no thread can renew."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from module_paths import ModulePaths
from real_client import client_of, kv_server
from scripted_server import CREDENTIALS, ScriptedServer
from scripted_sessions import Sessions
from server_process import ServerProcess, wait_until
from test_interrupts import interrupted_everywhere

from kvobj.client import KvClient, NewChunk, Session
from kvobj.client.aio import AsyncKvClient, AsyncSession
from kvobj.client.lease import boot_seconds
from kvobj.client.pin_ledger import PinLedger
from kvobj.client.session import RELEASES_AT_ONCE
from kvobj.errors import UnavailableError

SCRIPT = Path(__file__).with_name("interrupted_session_script.py")
PINS = [f"pin/{number}" for number in range(RELEASES_AT_ONCE + 2)]
TTL_MS = 1000
MANY_BYTES = 1 << 47
"""A stack that no process has room for: with it no thread starts."""

# A connection that an interrupt leaves to nobody is closed with its last reference.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    with kv_server(module_paths.mktemp("lifecycle")) as running:
        yield running


@contextmanager
def client_to(sessions: Sessions) -> Iterator[KvClient]:
    with (
        ScriptedServer(sessions) as server,
        KvClient(server.endpoint, CREDENTIALS, "cache", timeout_seconds=20, same_host=False) as client,
    ):
        yield client


def wait_for_no_thread(session: Session) -> None:
    thread = session._thread
    assert thread is not None
    thread.join(10)
    assert not thread.is_alive()


def wait_for_no_session(server: ServerProcess) -> None:
    wait_until(
        lambda: server.status()["leases"]["sessions"] == 0, timeout_seconds=20, what="the sessions of nobody to end"
    )


# -- dropped --------------------------------------------------------------------------------------------------------


def test_a_session_that_nobody_has_any_more_is_ended() -> None:
    sessions = Sessions()
    with client_to(sessions) as client:
        session = Session(client).__enter__()
        session.pin(["a"])
        dropped, thread = weakref.ref(session), session._thread
        assert thread is not None
        del session
        gc.collect()
        assert dropped() is None
        assert sessions.came("close 1").wait(10)
        thread.join(10)
        assert not thread.is_alive()


def test_a_session_is_renewed_for_as_long_as_somebody_has_a_pin_of_it(server: ServerProcess) -> None:
    with client_of(server) as client:
        client.put_chunk("a", b"a")
        (pin,) = Session(client, ttl_ms=TTL_MS).__enter__().pin(["a"])
        assert pin is not None
        gc.collect()
        until = boot_seconds() + 1.5 * TTL_MS / 1000
        wait_until(lambda: boot_seconds() > until, timeout_seconds=10, what="its first lease to be over")
        assert pin.is_valid
        del pin
        gc.collect()
        wait_for_no_session(server)


def test_a_session_whose_client_was_closed_is_ended(server: ServerProcess) -> None:
    client = client_of(server)
    session = Session(client, ttl_ms=TTL_MS).__enter__()
    client.close()
    wait_for_no_thread(session)
    assert not session.is_valid
    wait_for_no_session(server)


# -- interrupted ----------------------------------------------------------------------------------------------------


def test_a_session_that_is_interrupted_at_any_place_is_not_renewed_for_ever(server: ServerProcess) -> None:
    keys = server.credentials()
    command = [sys.executable, "-W", "ignore", str(SCRIPT), server.endpoint, keys.access_key, keys.secret_key]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert int(process.stdout.readline()) > 100
            wait_for_no_session(server)
            assert process.poll() is None
        finally:
            process.stdin.close()


def test_a_session_whose_close_was_interrupted_is_told_to_the_server() -> None:
    sessions = Sessions()
    with client_to(sessions) as client:
        opened: list[Session] = []
        interrupts = interrupted_everywhere(lambda: opened.pop().close())
        for number in range(1, 1000):
            opened.append(Session(client).__enter__())
            is_over = next(interrupts, None) is None
            gc.collect()
            assert sessions.came(f"close {number}").wait(10), f"interrupted at place {number}"
            if is_over:
                break
        assert len(sessions.asked) > 20


def test_who_was_interrupted_as_the_renewal_was_woken_holds_up_no_other() -> None:
    sessions = Sessions()
    with client_to(sessions) as client:
        opened: list[tuple[Session, list[Any]]] = []

        def release_enough() -> None:
            session, pins = opened[-1]
            session.release(pins[-2])

        interrupts = interrupted_everywhere(release_enough)
        is_over = False
        while not is_over:
            session = Session(client).__enter__()
            opened.append((session, session.pin(PINS)))
            for pin in opened[-1][1][:-2]:
                assert pin is not None
                session._pins.drop([pin])
                session._current().ledger.release(pin._grant.ids if pin._grant else ())
            is_over = next(interrupts, None) is None
            going_on = threading.Thread(target=_release_and_close, args=opened[-1], daemon=True)
            going_on.start()
            going_on.join(10)
            assert not going_on.is_alive(), f"after an interrupt at place {len(opened)}"
        assert len(opened) > 10


def _release_and_close(session: Session, pins: list[Any]) -> None:
    session.release(pins[-1])
    session.close()


CALLS: dict[str, Callable[[Session], Any]] = {
    "match": lambda session: session.match(ids=["a", "b"]),
    "pin": lambda session: session.pin(["a", "b"]),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_pins_of_an_interrupted_call_are_released(server: ServerProcess, call: str) -> None:
    with client_of(server) as client:
        client.mput([NewChunk("a", b"a"), NewChunk("b", b"b")])
        with Session(client, is_automatic=False) as session:
            results: list[Any] = []
            interrupts = interrupted_everywhere(lambda: results.append(CALLS[call](session)))
            places = 0
            for places in interrupts:
                session.renew()
                assert not session._pins, f"after an interrupt at place {places}"
                assert len(session._current().ledger) == 0, f"after an interrupt at place {places}"
            assert places > 100
            assert len(results) == 1
            for pin in results[0] if call == "pin" else [results[0].pin]:
                pin.release()
            session.renew()  # the server tells that there are some more that nobody knows of
            session.renew()
            assert server.status()["leases"]["pins"] == 0


def test_pins_that_are_held_by_a_ticket_are_released_once_nobody_has_it() -> None:
    ledger = PinLedger()
    kept, dropped = ledger.begin(), ledger.begin()
    ledger.end(kept, grant=1, pins=[b"1", b"2"], is_held_by_ticket=True)
    ledger.end(dropped, grant=2, pins=[b"3"], is_held_by_ticket=True)
    assert ledger.leaving == 0
    del dropped
    assert ledger.leaving == 1
    ledger.release([b"1"])
    statement = ledger.statement()
    assert (sorted(statement.release), statement.pins) == ([b"1", b"3"], 1)
    ledger.confirm(statement)
    del kept
    assert ledger.statement().release == (b"2",)


# -- without a thread -----------------------------------------------------------------------------------------------


def test_a_session_that_no_thread_can_renew_is_ended_and_may_be_entered_later(server: ServerProcess) -> None:
    with client_of(server) as client:
        client.put_chunk("a", b"a")
        assert client.match(ids=["a"]).matched == 1  # what the client itself needs is there
        session = Session(client)
        before = threading.stack_size(MANY_BYTES)
        try:
            with pytest.raises(UnavailableError, match="thread") as caught:
                session.__enter__()
        finally:
            threading.stack_size(before)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert server.status()["leases"]["sessions"] == 0
        with session:
            assert session.match(ids=["a"]).pin is not None
        assert server.status()["leases"]["sessions"] == 0


# -- cancelled ------------------------------------------------------------------------------------------------------


@contextmanager
def busy_threads(sessions: Sessions, client: AsyncKvClient) -> Iterator[None]:
    """Both threads for calls about sessions wait for the server within the block."""
    going_on = sessions.hold("match 0")
    tasks = [asyncio.ensure_future(client.is_answered(timeout_seconds=20)) for _ in range(2)]
    try:
        yield
    finally:
        going_on.set()
        for task in tasks:
            task.cancel()


@pytest.mark.parametrize("call", ["close", "abandon"])
async def test_a_session_whose_end_is_cancelled_before_it_has_a_thread_is_not_renewed(call: str) -> None:
    sessions = Sessions()
    with ScriptedServer(sessions) as server:
        async with AsyncKvClient(server.endpoint, CREDENTIALS, "cache", timeout_seconds=20, same_host=False) as client:
            session = await AsyncSession(client).__aenter__()
            with busy_threads(sessions, client):
                await asyncio.sleep(0)  # by now they have them
                ending = asyncio.ensure_future(getattr(session, call)())
                await asyncio.sleep(0)
                ending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await ending
            if call == "close":
                assert await asyncio.to_thread(sessions.came("close 1").wait, 10)
            await asyncio.to_thread(wait_for_no_thread, session.core)
            assert not session.is_valid
            assert ("close 1" in sessions.asked) == (call == "close")


async def test_a_close_that_finds_no_thread_in_time_raises_nothing_and_ends_the_renewal() -> None:
    sessions = Sessions()
    with ScriptedServer(sessions) as server:
        async with AsyncKvClient(server.endpoint, CREDENTIALS, "cache", timeout_seconds=0.5, same_host=False) as client:
            session = await AsyncSession(client).__aenter__()
            with busy_threads(sessions, client):
                await asyncio.sleep(0)  # by now they have them
                await session.close()
            await asyncio.to_thread(wait_for_no_thread, session.core)
            assert not session.is_valid


async def test_a_session_that_a_cancelled_task_had_opened_is_ended() -> None:
    sessions = Sessions()
    with ScriptedServer(sessions) as server:
        async with AsyncKvClient(server.endpoint, CREDENTIALS, "cache", timeout_seconds=20, same_host=False) as client:
            session = AsyncSession(client)
            entering = asyncio.ensure_future(session.__aenter__())
            await asyncio.sleep(0)
            # And the loop does not hear of it: it stands still meanwhile.
            wait_until(lambda: session.core._thread is not None, timeout_seconds=10, what="it to be open")
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            assert await asyncio.to_thread(sessions.came("close 1").wait, 10)
