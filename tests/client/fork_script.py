"""A program that forks while its client is in use: argument 1 is the endpoint, 2 and 3 the keys, 4 whether it may take the
same-host path. Run by `test_forking.py`.

Ends with status 0 where parent and child each saw what they should.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator

from kvobj.client import Credentials, KvClient, NewChunk, Pin, Session
from kvobj.client.kv_values import ReadChunk
from kvobj.errors import NoSuchSessionError, UnavailableError

KEYS = [f"fork/{number}" for number in range(8)]
SIZE_BYTES = 1 << 20


def payload(key: str) -> bytes:
    """What a chunk of this name holds."""
    return (key.encode() * SIZE_BYTES)[:SIZE_BYTES]


def read_all(client: KvClient, times: int) -> None:
    """Reads every chunk several times and compares each byte."""
    for _ in range(times):
        for key in KEYS:
            data = client.get_chunk(key)
            assert data is not None
            assert data == payload(key)


def in_child(client: KvClient, session: Session, pin: Pin) -> None:
    """The client works; the session is the parent's."""
    assert not session.is_valid
    assert not pin.is_valid
    assert session.read(pin, KEYS[0]) is None
    try:
        session.match(ids=KEYS)
    except NoSuchSessionError:
        pass
    else:
        raise AssertionError("the parent's session was used")
    pin.release()
    session.close()
    read_all(client, 3)
    with Session(client, holder="child") as own:
        found = own.match(ids=KEYS)
        assert found.pin is not None
        assert bytes(own.read(found.pin, KEYS[1]) or b"") == payload(KEYS[1])


def is_told(stream: Iterator[ReadChunk]) -> bool:
    """Whether the child is told that the stream's connection is the parent's; what it gets all the same is right."""
    try:
        for item in stream:
            assert item.data is None or bytes(item.data) == payload(KEYS[item.index])
    except UnavailableError:
        return True
    return False


def main() -> None:
    """Fork with threads in the middle of calls, a stream half read, and a session."""
    is_same_host = sys.argv[4] == "same-host"
    keys = Credentials(sys.argv[2], sys.argv[3])
    client = KvClient(sys.argv[1], keys, "cache", connections=4, same_host=is_same_host)
    client.mput([NewChunk(key, payload(key)) for key in KEYS])
    session = Session(client, holder="parent", ttl_ms=5000).__enter__()
    pin = session.match(ids=KEYS).pin
    assert pin is not None
    stream = client.mget(KEYS)
    assert next(stream).index == 0
    failed: list[BaseException] = []

    def hammer() -> None:
        try:
            read_all(client, 6)
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)

    threads = [threading.Thread(target=hammer) for _ in range(2)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            in_child(client, session, pin)
            status = 0 if is_told(stream) or is_same_host else 1
        except BaseException:  # noqa: BLE001 - the child must not go on as the parent
            traceback.print_exc()
        os._exit(status)
    rest = [bytes(item.data or b"") for item in stream]
    for thread in threads:
        thread.join()
    assert rest == [payload(key) for key in KEYS[1:]]
    assert not failed, failed
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pin.is_valid
    assert bytes(session.read(pin, KEYS[0]) or b"") == payload(KEYS[0])
    session.renew()
    assert session.reclaims == 0, "the child has released nothing of the parent's"
    session.close()


if __name__ == "__main__":
    main()
