"""What a fault proxy may do to a request of S3, and how it decides: by a seed, so that a run can be had again.

A decision depends on the seed, the operation, the key and on how often that key was asked for in that way, and on nothing else:
neither on time nor on the order in which connections come. So a retry is decided on its own, and the same requests meet the same
faults however they interleave. Rates are shares of the requests that a toxic can be done to, not of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

from blake3 import blake3


class Toxic(StrEnum):
    """One kind of fault. Where a body is meant it is that of a read's reply, or of a write's request."""

    UNAVAILABLE = "503"
    """503 ServiceUnavailable with an XML body; the request is read whole and goes no further."""
    UNAVAILABLE_BARE = "503 without a body"
    """503 with nothing in it, said before the request's body is read; the connection is closed."""
    SLOW_DOWN = "503 SlowDown"
    """503 SlowDown with Retry-After."""
    STALL_HEAD = "stall before the head"
    """The request is done, the reply waits."""
    STALL_BODY = "stall in mid-body"
    """Half of the body, a pause, the rest."""
    RESET_BODY = "reset in mid-body"
    """Half of the body, then a TCP reset. A write so hit never reaches the server whole."""
    TRUNCATED = "truncated body"
    """The reply ends early, with a close in good order."""
    WRONG_BYTE_DOWN = "wrong byte in a GET"
    """One bit of an object's body is turned on its way to the client."""
    WRONG_BYTE_UP = "wrong byte in a PUT"
    """One bit of a PUT's or a part's body is turned on its way to the server."""
    LOST_REPLY = "lost reply after the commit"
    """The request is done, the reply swallowed, the connection closed."""
    CONFLICT = "409"
    """409 OperationAborted; the request goes no further."""
    PRECONDITION = "412"
    """412 PreconditionFailed, asked for or not; the request goes no further."""
    TRICKLE = "slow trickle"
    """The reply comes a few bytes at a time."""
    REFUSED = "refused connections"
    """Connections are reset and for a while none is accepted: nobody listens on the port."""
    CLOSED_AT_ACCEPT = "closed at accept"
    """A connection is closed as soon as it is there. Each carries one request, so that there are many."""
    HALF_HEAD = "half of the reply's head"
    """The request is done; of the reply comes half of the head, then a close."""
    SKEWED = "403 RequestTimeTooSkewed"
    """As a server answers whose clock is a day ahead; its Date says the same."""


class Operation(StrEnum):
    """What a request is in S3's words; those that the remote tier has no use for are OTHER."""

    HEAD_BUCKET = "HeadBucket"
    LIST = "ListObjectsV2"
    LIST_UPLOADS = "ListMultipartUploads"
    DELETE_MANY = "DeleteObjects"
    HEAD = "HeadObject"
    GET = "GetObject"
    PUT = "PutObject"
    DELETE = "DeleteObject"
    CREATE_UPLOAD = "CreateMultipartUpload"
    PUT_PART = "UploadPart"
    LIST_PARTS = "ListParts"
    COMPLETE = "CompleteMultipartUpload"
    ABORT = "AbortMultipartUpload"
    CONNECT = "connect"
    OTHER = "other"


_OF_BUCKETS: Final = {
    ("HEAD", ""): Operation.HEAD_BUCKET,
    ("GET", ""): Operation.LIST,
    ("GET", "uploads"): Operation.LIST_UPLOADS,
    ("POST", "delete"): Operation.DELETE_MANY,
}
_OF_OBJECTS: Final = {
    ("HEAD", ""): Operation.HEAD,
    ("GET", ""): Operation.GET,
    ("PUT", ""): Operation.PUT,
    ("DELETE", ""): Operation.DELETE,
    ("POST", "uploads"): Operation.CREATE_UPLOAD,
    ("PUT", "uploadId"): Operation.PUT_PART,
    ("GET", "uploadId"): Operation.LIST_PARTS,
    ("POST", "uploadId"): Operation.COMPLETE,
    ("DELETE", "uploadId"): Operation.ABORT,
}
_TELLING: Final = ("uploads", "uploadId", "delete")
_NAMELESS: Final = frozenset({"uploadId", "continuation-token", "start-after"})


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it is decided upon: `key` is unescaped and empty for a bucket, `detail` is the query but for what the server
    made up."""

    operation: Operation
    key: str
    detail: str = ""

    @classmethod
    def parse(cls, method: str, target: str) -> Asked:
        """From a request line with a path-style target."""
        parts = urlsplit(target)
        bucket, _, key = parts.path.lstrip("/").partition("/")
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        telling = next((name for name in _TELLING if name in query), "")
        table = _OF_OBJECTS if key else _OF_BUCKETS
        operation = table.get((method, telling), Operation.OTHER) if bucket else Operation.OTHER
        kept = sorted(
            f"{name}={value}"
            for name, value in query.items()
            if name not in _NAMELESS and not name.lower().startswith("x-amz-")
        )
        return cls(operation, unquote(key), "&".join(kept))


@dataclass(frozen=True, slots=True)
class Plan:
    """What the proxy does from now on. `rate`: the share of requests that are hit, of those that a toxic can be done to and
    that are among `operations` (empty: all) and of keys that hold `key_part`. Seconds and rates of the toxics that take time:
    `stall_seconds` is how long a stall lasts, `outage_seconds` how long nobody listens. `clock_ahead_seconds` is added to every
    reply's Date, hit or not."""

    toxics: Sequence[Toxic] = ()
    rate: float = 0.0
    seed: int = 0
    operations: frozenset[Operation] = frozenset()
    key_part: str = ""
    stall_seconds: float = 2.0
    outage_seconds: float = 0.2
    trickle_bytes_per_second: float = 2000.0
    retry_after_seconds: int = 1
    clock_ahead_seconds: float = 0.0


NOTHING: Final = Plan()
_UPLOADS: Final = frozenset({Operation.PUT, Operation.PUT_PART})


def is_possible(toxic: Toxic, operation: Operation) -> bool:
    """Whether the toxic can be done to a request of this kind. Connections have toxics of their own."""
    if toxic is Toxic.CLOSED_AT_ACCEPT or operation is Operation.CONNECT:
        return toxic is Toxic.CLOSED_AT_ACCEPT and operation is Operation.CONNECT
    if toxic is Toxic.WRONG_BYTE_DOWN:
        return operation is Operation.GET
    if toxic is Toxic.WRONG_BYTE_UP:
        return operation in _UPLOADS
    return True


@dataclass(frozen=True, slots=True)
class Hit:
    """A decision to do something; `fraction` in [0, 1) says where, for toxics that hit a place in a body."""

    toxic: Toxic
    fraction: float


@dataclass(slots=True)
class Dice:
    """Decides. Remembers how often each thing was asked for, so it grows with the number of different requests."""

    _asked: Counter[Asked] = field(default_factory=Counter)

    def throw(self, plan: Plan, asked: Asked) -> Hit | None:
        """What is done to this request; None: it passes."""
        self._asked[asked] += 1
        if not plan.toxics or plan.rate <= 0 or (plan.operations and asked.operation not in plan.operations):
            return None
        if plan.key_part not in asked.key:
            return None
        possible = [toxic for toxic in plan.toxics if is_possible(toxic, asked.operation)]
        if not possible:
            return None
        text = f"{plan.seed} {asked.operation} {asked.key} {asked.detail} {self._asked[asked]}"
        digest = blake3(text.encode()).digest()
        if _fraction(digest[:8]) >= plan.rate:
            return None
        return Hit(possible[int.from_bytes(digest[8:12]) % len(possible)], _fraction(digest[12:20]))


def _fraction(eight: bytes) -> float:
    return int.from_bytes(eight) / 2**64
