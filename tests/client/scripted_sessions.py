"""A scripted server of sessions and pins: it loses what a test has it lose, and answers when the test lets it, or late."""

from __future__ import annotations

import socket
import threading
from itertools import count

import msgspec
from scripted_server import ok, read_request

_LOST = {"error": {"code": "NoSuchSession", "message": "no such session", "detail": {}}}
_NO_NAMES = {"error": {"code": "InvalidChunkId", "message": "no chunk id", "detail": {}}}


class Sessions:
    """Serves connections (`ScriptedServer`). `asked` has the calls in the order in which they came: `open 1`, `renew 1`, `match 1`,
    `pins 1` and `close 1`, with the session's number."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.released: list[bytes] = []
        self.pins_more = 0
        """So many pins are granted that nobody has asked for; and of a match so many more are told than were asked for."""
        self.matches = 0
        """So many chunks are told to match, with a pin."""
        self.refused: set[str] = set()
        """Names of namespaces whose chunks are no names for it any more."""
        self.lost: set[int] = set()
        """The numbers of sessions that it does not know any more."""
        self.late_seconds: dict[str, float] = {}
        """After how long a call is answered: the fault itself."""
        self._numbers = count(1)
        self._pins = count(1)
        self._came: dict[str, threading.Event] = {}
        self._holds: dict[str, threading.Event] = {}

    def hold(self, call: str) -> threading.Event:
        """That call is answered once the event is set."""
        return self._holds.setdefault(call, threading.Event())

    def came(self, call: str) -> threading.Event:
        """Set once that call has come."""
        return self._came.setdefault(call, threading.Event())

    def __call__(self, connection: socket.socket, _: int) -> None:
        while True:
            head, body = read_request(connection)
            method, target = head.decode().split()[:2]
            document = msgspec.msgpack.decode(body) if body else {}
            connection.sendall(self._answer(method, target.partition("?")[2], document))

    def _answer(self, method: str, query: str, document: dict[str, object]) -> bytes:  # noqa: PLR0911 - one for each call
        if method == "POST" and query.startswith("sessions"):
            number = next(self._numbers)
            self._note(f"open {number}")
            return _told({"session": number.to_bytes(16), "epoch": 1, "ttl_ms": 600_000, "renew_ms": 200_000})
        named = document.get("session", b"") or bytes.fromhex(query.partition("sessions=")[2])
        number = int.from_bytes(named if isinstance(named, bytes) else b"")
        what = {"PUT": "renew", "DELETE": "close"}.get(method) or query.partition("=")[0]
        self._note(f"{what} {number}")
        if number in self.lost:
            return _told(_LOST, status="404 Not Found")
        if what == "renew":
            release = document["release"]
            assert isinstance(release, list)
            self.released += release
            return _told({"ttl_ms": 600_000, "reclaim": False})
        if what == "pins":
            tails = document["tails"]
            if isinstance(tails, bytes):
                tails = [tails[at : at + 32] for at in range(0, len(tails), 32)]
            assert isinstance(tails, list)
            if document["namespace"] in self.refused:
                return _told(_NO_NAMES, status="400 Bad Request")
            named_tails = [*tails, *["more"] * self.pins_more]
            pins = [{"tail": tail, "live": True, "pin": next(self._pins).to_bytes(16)} for tail in named_tails]
            return _told({"pins": pins, "grant": 1, "deadline_ms": 600_000})
        if what == "match":
            told: dict[str, object] = {"tokens": 0, "size_bytes": 0, "expected_load_ms": 0}
            if not self.matches:
                return _told(told | {"matched": 0})
            pin = {"pin": next(self._pins).to_bytes(16), "grant": 1, "deadline_ms": 600_000}
            return _told(told | pin | {"matched": self.matches + self.pins_more})
        return _told({})

    def _note(self, call: str) -> None:
        self.asked.append(call)
        self.came(call).set()
        if call in self._holds:
            self._holds[call].wait(10)
        if call in self.late_seconds:
            threading.Event().wait(self.late_seconds[call])


def _told(document: object, *, status: str = "200 OK") -> bytes:
    answer = ok(msgspec.msgpack.encode(document), "content-type: application/msgpack")
    return answer.replace(b"200 OK", status.encode(), 1)
