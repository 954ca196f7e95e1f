"""From a request to its operation, for the calls of the KV API: sub-resources of a bucket, by method."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from kvobj.api.errors import S3Error
from kvobj.api.operations import (
    CloseSession,
    DeclareNamespace,
    GetChunks,
    GetNamespace,
    KvOperation,
    ListNamespaces,
    MatchChunks,
    OpenSameHost,
    OpenSession,
    PinChunks,
    PutChunks,
    ReadEvents,
    RemoveNamespace,
    RenewSameHost,
    RenewSession,
)
from kvobj.api.parameters import limit_of, name_of
from kvobj.api.request import Target

_SESSION_ID: Final = re.compile(r"[0-9a-f]{32}\Z").match
# No more digits than 2^63 has: of thousands int() itself makes an error, and none of ours.
_NUMBER: Final = re.compile(r"\d{1,19}\Z", re.ASCII).match

_Parse = Callable[[str, dict[str, str]], KvOperation]

# What each call may be asked, by method; each entry takes the bucket and the query.
_CALLS: Final[dict[str, dict[str, _Parse]]] = {
    "match": {"POST": lambda bucket, _: MatchChunks(bucket)},
    "pins": {"POST": lambda bucket, _: PinChunks(bucket)},
    "mget": {"POST": lambda bucket, _: GetChunks(bucket)},
    "mput": {"POST": lambda bucket, _: PutChunks(bucket)},
    "same-host": {
        "POST": lambda bucket, query: (
            RenewSameHost(bucket, _session_id(query, "same-host")) if query["same-host"] else OpenSameHost(bucket)
        )
    },
    "sessions": {
        "POST": lambda bucket, _: OpenSession(bucket),
        "PUT": lambda bucket, query: RenewSession(bucket, _session_id(query)),
        "DELETE": lambda bucket, query: CloseSession(bucket, _session_id(query)),
    },
    "namespace": {
        "PUT": lambda bucket, query: DeclareNamespace(bucket, _namespace_name(query)),
        "GET": lambda bucket, query: GetNamespace(bucket, _namespace_name(query)),
        "DELETE": lambda bucket, query: RemoveNamespace(bucket, _namespace_name(query)),
    },
    "namespaces": {
        "GET": lambda bucket, query: ListNamespaces(
            bucket, name_of(query, "start-after"), max(1, limit_of(query, "max-keys"))
        )
    },
    "events": {"GET": lambda bucket, query: ReadEvents(bucket, _sequence(query, "after"), "follow" in query)},
}
KV_CALLS: Final = frozenset(_CALLS)


def is_kv_call(target: Target) -> bool:
    """Whether the request is a call of the KV API, which is told of errors in documents of its own."""
    return bool(target.bucket and not target.key and target.query and not KV_CALLS.isdisjoint(target.parameters))


def parse_kv_call(method: str, target: Target) -> KvOperation:
    """The call that a request makes. Raises `S3Error`: InvalidArgument, MethodNotAllowed, NoSuchSession."""
    named = KV_CALLS.intersection(target.parameters)
    if len(named) > 1:
        raise S3Error("InvalidArgument", f"A request names one of {', '.join(sorted(named))}.")
    (call,) = named
    methods = _CALLS[call]
    parse = methods.get(method)
    if parse is None:
        raise S3Error("MethodNotAllowed", Method=method, ResourceType=call.upper(), Allow=", ".join(methods))
    return parse(target.bucket, target.parameters)


def _session_id(query: dict[str, str], name: str = "sessions") -> bytes:
    """A session's id. One that is none of this server's making names no session, and never reaches the catalog."""
    value = query[name]
    if not _SESSION_ID(value):
        raise S3Error("NoSuchSession")
    return bytes.fromhex(value)


def _namespace_name(query: dict[str, str]) -> str:
    name = name_of(query, "namespace")
    if not name:
        raise S3Error("InvalidArgument", "A namespace's name is missing.", ArgumentName="namespace")
    return name


def _sequence(query: dict[str, str], name: str) -> int | None:
    value = query.get(name)
    if value is None or value == "":
        return None
    if not _NUMBER(value) or int(value) >= 2**63:
        raise S3Error("InvalidArgument", f"Argument {name} must be an event's number.", ArgumentName=name)
    return int(value)
