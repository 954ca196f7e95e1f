"""Where a connector's store is and how an engine's chunks are named there; from the tables of an engine's configuration."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from kvobj.client.connection import Endpoint, trusting
from kvobj.errors import ConfigurationError, InvalidRequestError

CREDENTIALS_FILE: Final = "credentials_file"

_DURABILITIES: Final = ("memory", "local", "shared")
_CONNECTIONS_MAX: Final = 256
_THREADS_MAX: Final = 64
_LEASE_MS_MAX: Final = 600_000

# A key or a region with anything else in it cannot be sent, or breaks the signature's header apart.
_PRINTABLE: Final = re.compile(r"[!-~]+")
_BREAKS_THE_HEADER: Final = frozenset("/,=")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]*", re.ASCII)
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DECLARED_CHARACTERS_MAX: Final = 1024
"""Of a text in a declaration, as a server takes it."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """One bucket of one server, and one namespace in it. Without `declaration` the namespace is `default` or was declared before;
    with it, it is declared at first use, and a namespace of that name that is declared otherwise is refused. With `declare` False
    its owner has declared it, and whether as `declaration` says is looked at and not left to trust."""

    endpoint: str
    """`http://HOST:PORT`, or https."""
    bucket: str
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    region: str = "us-east-1"
    namespace: str = "default"
    declaration: Mapping[str, object] | None = None
    declare: bool = True
    durability: str | None = None
    """`memory`, `local` or `shared`; None: as the bucket has it."""
    timeout_seconds: float = 5.0
    """Of every call, since engines wait for them; one that moves chunks has `SECONDS_PER_BYTE` more for their bytes."""
    rest_seconds: float = 0.5
    """How long nothing is asked after a server did not answer. Doubles up to `rest_seconds_max` while that lasts."""
    rest_seconds_max: float = 10.0
    lease_ms: int = 30_000
    """How long what is held stays held without a sign of life from here."""
    connections: int = 8
    threads: int = 4
    """How many threads move the bytes of one large batch; no more than there are cores."""
    same_host: bool = True
    """Whether chunks may come through shared memory where the server is on this host."""
    verify: bool = True
    """Whether what comes over the network is hashed."""
    verify_same_host: bool = False
    """Whether what is copied from shared memory is hashed, too, which takes longer than the copy."""
    ca_bundle: str | None = None
    """A PEM file of the authorities that are trusted in place of the system's; of https alone."""

    @classmethod
    def parse(
        cls, values: Mapping[str, object], environment: Mapping[str, str], *, problems: Sequence[str] = ()
    ) -> Self:
        """From a table of the engine's configuration: the fields above, or `credentials_file` (TOML with `access_key` and
        `secret_key`, as the server's DATA/credentials; `~` is the user's home) in the place of the keys; without either the
        environment's KVOBJ_ACCESS_KEY and KVOBJ_SECRET_KEY. `ConfigurationError`, an `InvalidRequestError`, names every fault, and
        `problems` that the caller has found with settings of its own."""
        found = list(problems)
        found += [f"{name}: no such setting" for name in values if name not in _CHECKS and name != CREDENTIALS_FILE]
        found += [f"{name}: is needed" for name in ("endpoint", "bucket") if name not in values]
        given: dict[str, Any] = {name: value for name, value in values.items() if name in _CHECKS}
        for name, value in given.items():
            problem = _CHECKS[name](value)
            if problem:
                found.append(f"{name}: {problem}")
        try:
            given |= _keys(values, environment)
        except ConfigurationError as error:
            found += error.problems
        if found:
            raise ConfigurationError(found)
        return cls(**given)


SECONDS_PER_BYTE: Final = 1 / (128 * 1024 * 1024)


def _text(value: object) -> str:
    return "" if isinstance(value, str) and value else "is no text"


def _endpoint(value: object) -> str:
    if not isinstance(value, str):
        return "is no text"
    try:
        Endpoint.parse(value)
    except InvalidRequestError as error:
        return error.message
    return ""


def _bucket(value: object) -> str:
    if isinstance(value, str) and value and not _BUCKET.fullmatch(value):
        return "is no bucket's name: a-z, 0-9, dots and hyphens"
    return _text(value)


def _namespace(value: object) -> str:
    if isinstance(value, str) and value and not _NAMESPACE.fullmatch(value):
        return (
            "is no namespace's name: 1 to 128 of letters, digits, dot, underscore and hyphen, a letter or digit first"
        )
    return _text(value)


def _printable(value: object) -> str:
    if isinstance(value, str) and value and not _PRINTABLE.fullmatch(value):
        return "must be printable ASCII without blanks and line breaks"
    return _text(value)


def _access_key(value: object) -> str:
    if isinstance(value, str) and not _BREAKS_THE_HEADER.isdisjoint(value):
        return "must be without slashes, commas and equals signs"
    return _printable(value)


def _seconds(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if is_number and 0 < float(value) <= 3600 else "is no number of seconds between 0 and 3600"  # type: ignore[arg-type]  # noqa: PLR2004


def _whole(least: int, most: int) -> Callable[[object], str]:
    def check(value: object) -> str:
        is_whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return "" if is_whole else f"is no whole number from {least} to {most}"

    return check


def _declaration(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return "is no table"
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:  # ValueError: half a character, too
        return f"cannot be sent: {error}"
    return ""


def _durability(value: object) -> str:
    return "" if value is None or value in _DURABILITIES else f"is none of {', '.join(_DURABILITIES)}"


def _ca_bundle(value: object) -> str:
    if value is None or not isinstance(value, str) or not value:
        return "" if value is None else _text(value)
    try:
        trusting(value)
    except ConfigurationError as error:
        return error.problems[0].removeprefix("ca_bundle: ")
    return ""


def _flag(value: object) -> str:
    return "" if isinstance(value, bool) else "is neither true nor false"


_CHECKS: Final[Mapping[str, Callable[[object], str]]] = {
    "endpoint": _endpoint,
    "bucket": _bucket,
    "access_key": _access_key,
    "secret_key": _printable,
    "region": _printable,
    "namespace": _namespace,
    "declaration": _declaration,
    "declare": _flag,
    "durability": _durability,
    "timeout_seconds": _seconds,
    "rest_seconds": _seconds,
    "rest_seconds_max": _seconds,
    "lease_ms": _whole(1000, _LEASE_MS_MAX),
    "connections": _whole(1, _CONNECTIONS_MAX),
    "threads": _whole(1, _THREADS_MAX),
    "same_host": _flag,
    "verify": _flag,
    "verify_same_host": _flag,
    "ca_bundle": _ca_bundle,
}
assert set(_CHECKS) == {each.name for each in fields(LinkSettings)}


def _keys(values: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, str]:
    """The key pair, from the first place that has one."""
    given = {"access_key", "secret_key"} & set(values)
    if len(given) == 1:
        raise ConfigurationError(["access_key, secret_key: one is of no use without the other"])
    if given:
        return {}  # checked with the others
    file = values.get(CREDENTIALS_FILE)
    if file is None:
        names = {"access_key": "KVOBJ_ACCESS_KEY", "secret_key": "KVOBJ_SECRET_KEY"}
        found: Mapping[str, object] = {name: environment.get(variable, "") for name, variable in names.items()}
        missing = (
            "access_key, secret_key: given neither here, nor by credentials_file, nor by KVOBJ_ACCESS_KEY and KVOBJ_SECRET_KEY"
            " in the environment"
        )
    elif not isinstance(file, str):
        raise ConfigurationError([f"{CREDENTIALS_FILE}: is no text"])
    else:
        try:
            found = tomllib.loads(Path(file).expanduser().read_text())
        except (OSError, ValueError, RuntimeError) as error:  # the last: nobody's home
            raise ConfigurationError([f"{CREDENTIALS_FILE}: {file}: {_why(error)}"]) from error
        names = {name: f"{CREDENTIALS_FILE}: {file}: {name}" for name in ("access_key", "secret_key")}
        missing = f"{CREDENTIALS_FILE}: {file}: has no access_key and secret_key"
    pair = {name: found.get(name) for name in names}
    keys = {name: value for name, value in pair.items() if isinstance(value, str) and value}
    if len(keys) != len(pair):
        raise ConfigurationError([missing])
    problems = [f"{names[name]}: {problem}" for name, value in keys.items() if (problem := _CHECKS[name](value))]
    if problems:
        raise ConfigurationError(problems)
    return keys


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
