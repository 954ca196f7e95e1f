"""Messages between the store process and a worker process: length-prefixed msgpack arrays, and errors as values.

Both ends are kvobj of one version, which they compare before the first message (`agreement`); still nothing is ever executed or
built but the declared types. A message is `[kind, number, method, body]`; `number` names the call that a reply is for, and is 0
where nobody waits.
"""

from __future__ import annotations

import inspect
import struct
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, IntEnum
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from types import GenericAlias
from typing import Any, Final

import msgspec

from kvobj import errors
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import BucketRow, ObjectRow
from kvobj.errors import KvobjError, UnavailableError

_pack_length: Final = struct.Struct("<I").pack
_unpack_length: Final = struct.Struct("<I").unpack_from

FRAME_BYTES_MAX: Final = 512 * 1024 * 1024
"""More in one message is a defect of the other end; the rows of the longest list that a request may name are a tenth of it."""
_LENGTH_BYTES: Final = 4


class Kind(IntEnum):
    """What a message is."""

    CALL = 0
    TELL = 1
    RESULT = 2
    FAILURE = 3
    CANCEL = 4


_RESULT: Final = int(Kind.RESULT)


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """See the module's text. `body`: arguments, a result, or a `Failure`."""

    kind: int
    number: int
    method: int
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error of `kvobj.errors` by its class's name. `rows`: those of its data that are rows of the catalog, by name and type."""

    name: str
    message: str
    data: dict[str, Any]
    rows: dict[str, tuple[str, msgspec.Raw]] = {}


_ROWS: Final[dict[str, type]] = {"bucket": BucketRow, "object": ObjectRow, "namespace": NamespaceRow}
_ERRORS: Final[dict[str, type[KvobjError]]] = {
    name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, KvobjError)
}
_PLAIN: Final = (str, int, float, bool, bytes, type(None))


def encode_hook(value: object) -> object:
    """Values that msgpack has no word for: subclasses of bytes (blob ids), any mapping, and some of the configuration's."""
    if isinstance(value, bytes | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path | IPv4Network | IPv6Network):
        return str(value)
    raise NotImplementedError(f"{type(value)} does not cross between processes")


def decode_hook(kind: type, value: Any) -> object:  # noqa: ANN401 - what msgspec found in the message
    """The reverse of `encode_hook`."""
    if kind in (IPv4Network, IPv6Network):
        return ip_network(value)
    if issubclass(kind, Path):
        return kind(value)
    raise NotImplementedError(f"{kind} does not cross between processes")


_encode: Final = msgspec.msgpack.Encoder(enc_hook=encode_hook).encode
_decode_message: Final = msgspec.msgpack.Decoder(Message).decode
_decode_failure: Final = msgspec.msgpack.Decoder(Failure).decode


def frame(kind: Kind, number: int, method: int, body: object) -> bytes:
    """One message with its length in front."""
    encoded = _encode((int(kind), number, method, body))
    return len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded


def result_frame(number: int, body: object) -> bytes:
    """`frame` of a result: of the hot calls, the store process sends one each."""
    encoded = _encode((_RESULT, number, 0, body))
    return _pack_length(len(encoded)) + encoded


def failure_of(error: KvobjError) -> Failure:
    """The error as a value. Data that is neither plain nor a row becomes its text."""
    data: dict[str, Any] = {}
    rows: dict[str, tuple[str, msgspec.Raw]] = {}
    for name, value in error.data.items():
        kind = next((word for word, row in _ROWS.items() if isinstance(value, row)), None)
        if kind is not None:
            rows[name] = kind, msgspec.Raw(_encode(value))
        else:
            data[name] = _plain(value)
    return Failure(type(error).__name__, error.message, data, rows)


def error_of(body: msgspec.Raw) -> KvobjError:
    """The error of a failure as it came."""
    return error_from(_decode_failure(body))


def error_from(failure: Failure) -> KvobjError:
    """The error that a failure tells of; one that is not known here is an `UnavailableError`."""
    kind = _ERRORS.get(failure.name)
    if kind is None or kind is errors.ConfigurationError:
        return UnavailableError(failure.message, error=failure.name)
    data = {name: tuple(value) if isinstance(value, list) else value for name, value in failure.data.items()}
    for name, (row, encoded) in failure.rows.items():
        data[name] = msgspec.msgpack.decode(encoded, type=_ROWS[row])
    return kind(failure.message, **data)


def _plain(value: object) -> object:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return str(value)


class FrameReader:
    """Cuts a stream of bytes into messages. `ValueError` (msgspec's among them) for what is none."""

    __slots__ = ("_buffer", "_needed")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = 0

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now."""
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._needed:  # a long message: it is not looked at with every piece
                return []
            data = bytes(buffer)
            buffer.clear()
        found: list[Message] = []
        view = memoryview(data)
        position, end = 0, len(data)
        while end - position >= _LENGTH_BYTES:
            start = position + _LENGTH_BYTES
            stop = start + _unpack_length(data, position)[0]
            if stop > end:
                if stop - start > FRAME_BYTES_MAX:
                    raise ValueError(f"a message of {stop - start} bytes")
                self._needed = stop - position
                break
            found.append(_decode_message(view[start:stop]))
            position = stop
        else:
            self._needed = _LENGTH_BYTES
        if position < end:
            buffer += view[position:]
        return found


class Signature:
    """How a method's arguments and result travel: taken from its annotations, so that both ends agree with the type checker."""

    __slots__ = ("decode_arguments", "decode_result", "defaults", "name", "parameters")

    def __init__(self, name: str, method: Callable[..., object]) -> None:
        self.name = name
        hints = inspect.get_annotations(inspect.unwrap(method), eval_str=True)
        returned = hints.pop("return", None)
        found = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
        self.parameters = tuple(each.name for each in found)
        self.defaults = {each.name: each.default for each in found if each.default is not inspect.Parameter.empty}
        arguments = GenericAlias(tuple, tuple(hints[each.name] for each in found))
        self.decode_arguments: Callable[[msgspec.Raw], tuple[object, ...]] = msgspec.msgpack.Decoder(
            arguments, dec_hook=decode_hook
        ).decode
        self.decode_result: Callable[[msgspec.Raw], Any] = msgspec.msgpack.Decoder(
            type(None) if returned is None else returned, dec_hook=decode_hook
        ).decode

    def bound(self, positional: tuple[object, ...], named: dict[str, object]) -> tuple[object, ...]:
        """The arguments in their order."""
        if not named and len(positional) == len(self.parameters):
            return positional
        given = dict(zip(self.parameters, positional, strict=False)) | named
        return tuple([given[name] if name in given else self.defaults[name] for name in self.parameters])


def signatures_of(interface: type) -> dict[str, Signature]:
    """The public methods of a class that says what can be called, by name, in their order: the method's number is its place."""
    return {name: Signature(name, method) for name, method in _methods_of(interface).items()}


def _methods_of(interface: type) -> dict[str, Callable[..., object]]:
    return {name: value for name, value in vars(interface).items() if inspect.isfunction(value) and name[0] != "_"}


def agreement(version: str, interfaces: Sequence[type], message: type) -> bytes:
    """A digest of a program's version, the methods of these interfaces with their parameters, and the fields of this message and of
    every type that one of them names. Two programs of which it is equal understand each other: methods are numbered by their order
    and values are encoded as arrays, so that neither would notice by itself."""
    lines: list[str] = [version]
    seen: set[type] = set()
    for interface in interfaces:
        for name, method in _methods_of(interface).items():
            hints = typing.get_type_hints(method)
            lines.append(f"{interface.__name__}.{name} {list(hints.items())}")
            for hint in hints.values():
                _describe(hint, lines, seen)
    _describe(message, lines, seen)
    return sha256("\n".join(lines).encode()).digest()


def _describe(kind: object, lines: list[str], seen: set[type]) -> None:
    for argument in typing.get_args(kind):
        _describe(argument, lines, seen)
    if not isinstance(kind, type) or kind in seen or kind.__module__.partition(".")[0] != "kvobj":
        return
    seen.add(kind)
    if issubclass(kind, Enum):
        lines.append(f"{kind!r} {[(each.name, each.value) for each in kind]}")
        return
    hints = typing.get_type_hints(kind)
    lines.append(f"{kind!r} {list(hints.items())}")
    for hint in hints.values():
        _describe(hint, lines, seen)
