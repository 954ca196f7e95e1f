"""What the KV API's calls take and answer, as a client sees it (docs/kv-api.md). Fields that a newer server adds are ignored."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from typing import Any, Final

import msgspec

from kvobj.errors import InvalidChunkIdError, InvalidRequestError, UnavailableError
from kvobj.ids.chunk_ids import CHUNK_ID_BYTES, Tokens, chunk_ids, token_bytes

Name = bytes | str
"""What a chunk is called within its namespace: 32 raw bytes where ids are kvobj's or an engine's digests, else a string."""

Buffer = bytes | bytearray | memoryview

ROOT: Final = "root"
"""The parent of a first chunk."""

_LAYERS_MAX: Final = 2**31
_HEX_ID: Final = re.compile("[0-9a-f]{64}")
_ACCEPTED: Final = re.compile("[A-Za-z0-9:/]{1,32}(;max-error=[0-9.e+-]+)?")
_DIGITS: Final = Context(prec=13, rounding=ROUND_CEILING)
_HEADER_TEXT: Final = re.compile("[!-~](?:[ -~]*[!-~])?")


class Namespace(msgspec.Struct, frozen=True):
    """A declared namespace. `key` and `root` stand in answers about this one alone, not in lists; the key is a secret."""

    name: str
    ids: str
    chunk_tokens: int
    fingerprint: bytes = b""
    key: bytes = b""
    root: bytes = b""
    chunk_bytes: int | None = None
    part_axis: str | None = None
    may_write: bool = True
    chunks: int = 0
    size_bytes: int = 0
    declaration: dict[str, Any] = msgspec.field(default_factory=dict)
    codecs: dict[str, str] = msgspec.field(default_factory=dict)
    lossy: bool = False
    profile: str | None = None

    def __repr__(self) -> str:
        return f"Namespace({self.name!r}, ids={self.ids!r})"

    def chunk_ids(self, tokens: Tokens, *, behind: bytes | None = None, partial_last: bool = False) -> list[bytes]:
        """The ids of a sequence's chunks in a namespace with `ids: kvobj`, in order; `behind`: the chunk to go on after.

        Tokens behind the last whole chunk are left out, or a chunk of their own with `partial_last`. `InvalidTokensError`.
        """
        ids = chunk_ids(
            self.key,
            behind or self.root,
            token_bytes(tokens),
            chunk_tokens=self.chunk_tokens,
            partial_last=partial_last,
        )
        return [ids[at : at + CHUNK_ID_BYTES] for at in range(0, len(ids), CHUNK_ID_BYTES)]

    def key_of(self, name: Name) -> str:
        """The S3 key of a chunk. `InvalidChunkIdError` for what names none, here or anywhere: it would be read as another's."""
        if isinstance(name, bytes):
            if len(name) != CHUNK_ID_BYTES:
                raise InvalidChunkIdError("a chunk id has 32 bytes", size_bytes=len(name))
            name = name.hex()
        else:
            self._check_text(name)
        key = name if self.ids == "kvobj" or self.name == DEFAULT_NAME else f"{self.name}/{name}"
        if ".." in key:
            _check_depth(key)
        return key

    def check_names(self, chunks: Iterable[NewChunk]) -> None:
        """`InvalidChunkIdError` where the name of one of these, or of its parent, is none."""
        for chunk in chunks:
            if not _is_raw_id(chunk.id):  # as most are
                self.key_of(chunk.id)
            if chunk.parent is not None and not _is_raw_id(chunk.parent):
                parent_text(self, chunk.parent)

    def _check_text(self, name: str) -> None:
        """The empty key is the bucket itself, and what is no id of kvobj's lies in another namespace."""
        if not isinstance(name, str):
            raise InvalidChunkIdError("a name is bytes or a string", type=type(name).__name__)
        if self.ids == "kvobj":
            if _HEX_ID.fullmatch(name) is None:
                raise InvalidChunkIdError("a chunk id has 64 lower-case hex digits", name=name)
        elif not name:
            raise InvalidChunkIdError("a chunk's key is not empty")
        elif "\0" in name:
            raise InvalidChunkIdError("a chunk's key has no NUL", name=name)
        else:
            check_writable(name)

    @property
    def has_chains(self) -> bool:
        """Whether every chunk surely has a parent, so that one pin on a tail protects all before it."""
        return self.ids == "kvobj"


def _is_raw_id(name: Name) -> bool:
    return isinstance(name, bytes) and len(name) == CHUNK_ID_BYTES


def check_writable(key: str) -> None:
    """`InvalidChunkIdError` for a key that UTF-8 has no bytes for."""
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise InvalidChunkIdError("a chunk's key is text that UTF-8 can write", reason=str(error)) from error


def check_namespace(namespace: Namespace) -> Namespace:
    """The namespace as it was given. `TypeError` for what is none: often it is the name of one."""
    if not isinstance(namespace, Namespace):
        raise TypeError(
            f"a namespace is what KvClient.namespace(name) or declare_namespace answers, and not a {type(namespace).__name__}"
        )
    return namespace


def check_layers(layers: tuple[int, int] | None) -> tuple[int, int] | None:
    """The layers as they were given. `InvalidRequestError` for what no chunk has: what is no pair of whole numbers from 0 on,
    in order; what the chunk has is the server's to know."""
    if layers is None:
        return None
    given: Sequence[object] = layers  # whatever the type says
    first, last = given if len(given) == 2 else (None, None)  # noqa: PLR2004 - a pair
    if type(first) is not int or type(last) is not int or not 0 <= first <= last < _LAYERS_MAX:
        raise InvalidRequestError("layers are (A, B), both of the chunk, A not above B", layers=repr(layers)[:100])
    return layers


def parent_text(namespace: Namespace, parent: Name | None) -> str | None:
    """A parent as text: `ROOT`, the name with raw ids in hex, or None. `InvalidChunkIdError` for what no chunk is called."""
    if parent is None or (isinstance(parent, str) and parent == ROOT):
        return parent
    namespace.key_of(parent)
    return parent.hex() if isinstance(parent, bytes) else parent


def fits_header(text: str) -> bool:
    """Whether a header field carries a name as it is: printable ASCII, and no space at either end. Others are trimmed, or read in
    another encoding than they were written in, on their way."""
    return _HEADER_TEXT.fullmatch(text) is not None


def _check_depth(key: str) -> None:
    """`InvalidChunkIdError` for a key that climbs out of its bucket: no URL has it, since whoever normalises one would take it for
    another bucket's."""
    depth = 0
    for segment in key.split("/"):
        depth += -1 if segment == ".." else segment not in ("", ".")
        if depth < 0:
            raise InvalidChunkIdError("a chunk's key does not climb out of its bucket by '..'", name=key)


DEFAULT_NAME: Final = "default"
DEFAULT: Final = Namespace(name=DEFAULT_NAME, ids="foreign", chunk_tokens=0)
"""The namespace that every KV bucket has without a declaration."""


RAW: Final = "raw"
"""The codec of plain bytes."""

ANY_FORM: Final = (f"{RAW};max-error=9e99",)
"""`accept` of who takes a chunk whatever is left of it."""


def accepted(accept: Sequence[str], max_error: float | None) -> list[str]:
    """The items of `x-kvobj-accept`: codecs, each with the bound where it names none. `TypeError` for what is no list of codecs'
    names: a text for one, of which each character would be a name. `InvalidRequestError` for a bound that no error can have."""
    if isinstance(accept, str | bytes | bytearray):
        raise TypeError(f"accept is a list of codecs, as in ({accept!r},), and not one of them by itself")
    bound = "" if max_error is None else f";max-error={bound_text(max_error)}"
    items: list[str] = []
    given: Sequence[object] = accept  # whatever the type says
    for codec in given:
        if not isinstance(codec, str) or (found := _ACCEPTED.fullmatch(codec)) is None:
            raise TypeError(f"accept has the names of codecs (raw, x3, eq4 …), and {codec!r} is none")
        items.append(codec if found[1] else codec + bound)
    return items


def bound_text(max_error: float) -> str:
    """A bound in as many digits as the header takes, rounded up: who asks for the very error of a copy gets that copy."""
    error = float(max_error)
    if not 0 <= error < math.inf:
        raise InvalidRequestError(
            "max_error is a finite number from 0 on; None takes any error", max_error=repr(max_error)
        )
    # The header's exponents have two digits. No dtype has values so far apart, or so close.
    return format(_DIGITS.create_decimal_from_float(min(max(error, 1e-99), 9e99) if error else 0.0), "e")


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A chunk as the server holds it. `data` is a frame, or the plain bytes where `codec` is `raw`. `lossy` is what the server says
    of a lossy copy (`eq4;max-error=…`), None where nothing is lost; `digest` is BLAKE3 of the plain bytes as they were put, and
    `lossy_digest` of those that a lossy copy decodes to."""

    data: memoryview
    codec: str
    lossy: str | None
    digest: bytes | None
    tier: str
    lossy_digest: bytes | None = None

    @property
    def plain_digest(self) -> bytes | None:
        """BLAKE3 of what `data` is, or decodes to; None where the server does not know it yet."""
        return self.digest if self.lossy is None else self.lossy_digest


class ChunkDetail(msgspec.Struct, frozen=True):
    """One chunk of a match with details. `id` is a `Name`: raw bytes or a string, as its namespace has them."""

    id: Any
    size_bytes: int
    digest: bytes | None
    tier: str
    codec: str


class Explanation(msgspec.Struct, frozen=True):
    """Where a chain breaks, and why."""

    at: int
    reason: str
    when_ms: int | None = None
    namespace_differs: tuple[str, ...] = ()


class MatchAnswer(msgspec.Struct, frozen=True):
    """The longest stored run. `pin` (with its `grant` and `deadline_ms`) where one was asked for and anything matched."""

    matched: int
    tokens: int
    size_bytes: int
    expected_load_ms: int
    pin: bytes | None = None
    grant: int = 0
    deadline_ms: int = 0
    chunks: tuple[ChunkDetail, ...] = ()
    explain: Explanation | None = None

    def check(self, asked: Sequence[Name] | None) -> None:
        """`UnavailableError` where this says more than was asked for, by names."""
        if self.matched < 0 or (asked is not None and self.matched > len(asked)):
            raise UnavailableError("the answer is about other chunks", matched=self.matched)


class SessionAnswer(msgspec.Struct, frozen=True):
    """An opened session."""

    session: bytes
    epoch: int
    ttl_ms: int
    renew_ms: int


class RenewalAnswer(msgspec.Struct, frozen=True):
    """A renewed session."""

    ttl_ms: int
    reclaim: bool


class TailAnswer(msgspec.Struct, frozen=True):
    """One tail that was asked to be pinned, a `Name`; `pin` is None where it is not live."""

    tail: Any
    live: bool
    pin: bytes | None = None


class PinsAnswer(msgspec.Struct, frozen=True):
    """Pins granted together."""

    pins: tuple[TailAnswer, ...]
    grant: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk to put. `data` must not change until the call that puts it has ended. `parent`: the chunk before it, `ROOT` for the
    first of a sequence, or None, which says nothing of one (foreign keys only): see `KvClient.put_chunk`. `tokens` where it is not
    full; `digest`: BLAKE3 of the bytes, which the server then checks."""

    id: Name
    data: Buffer
    parent: Name | None = None
    tokens: int | None = None
    digest: bytes | None = None


class StoredChunk(msgspec.Struct, frozen=True):
    """What a PUT tells. `existed`: somebody had stored it before, and nothing was stored now; `digest` is of what is stored, None
    while it is not yet known."""

    existed: bool
    durability: str
    etag: str
    digest: bytes | None = None


class StoredPart(msgspec.Struct, frozen=True):
    """What a PUT of a part tells: how many of the chunk's `count` parts are stored now. `existed`: this one, or the whole chunk,
    was stored before by another writer."""

    existed: bool
    have: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the chunk is whole, and so is visible."""
        return self.have == self.count


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """One item of an mget: the chunk's bytes, or those of one of its layers; None: it is not stored."""

    index: int
    layer: int | None
    data: bytearray | memoryview | None


class Event(msgspec.Struct, frozen=True):
    """One line of `?events`. Of a `gap`, only `first` and `last` tell anything: these events are not known any more."""

    type: str
    seq: int = 0
    time_ms: int = 0
    namespace: str | None = None
    ids: Sequence[str] = ()
    parent: str | None = None
    tokens: int = 0
    tier: str | None = None
    reason: str | None = None
    first: int = msgspec.field(name="from", default=0)
    last: int = msgspec.field(name="to", default=0)
