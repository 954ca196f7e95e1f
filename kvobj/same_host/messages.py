"""The messages of a same-host connection, as msgpack arrays; version 1.

A connection is used by one caller at a time. Requests are answered in their order, and may be sent ahead of the answers to those
before. `Release` and `Abandon` have no reply. Before a reply that names regions for the first time come `Regions` messages, whose
bytes carry the regions' descriptors in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final

import msgspec

from kvobj.errors import InvalidRequestError, UnavailableError

VERSION: Final = 1
TOKEN_BYTES: Final = 32
KEYS_MAX: Final = 1024
"""Of one `Open`; a batch of chunks has at most 1,000."""
KEYS_AHEAD: Final = 64
"""Of one `Open` that is ahead of a read: so many are looked up where it arrives."""
RELEASES_MAX: Final = 4096
REQUEST_BYTES_MAX: Final = KEYS_MAX * (2 * 1024 + 256)
"""The longest request there is: a `Commit` of `KEYS_MAX` chunks, each with a name and a parent of 1,024 bytes."""
HELLO_BYTES_MAX: Final = 1024
"""A `Hello`, and room for what may be appended to it: nobody else is believed to have more to say before it."""
REPLY_BYTES_MAX: Final = 4 * 1024 * 1024
DESCRIPTORS_MAX: Final = 64
"""Of one `Regions` message; the kernel passes at most 253."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_Keys = Annotated[list[str], msgspec.Meta(max_length=KEYS_MAX)]
_Handles = Annotated[list[_Number], msgspec.Meta(max_length=RELEASES_MAX)]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Arrays: a message costs its values and not its field names. Fields are only ever appended."""


# -- what a client says ------------------------------------------------------------------------------------------
class Hello(_Message, frozen=True, array_like=True, gc=False, tag=1):
    """First: the token that HTTP gave, good for one connection."""

    version: int
    token: _Token


class Open(_Message, frozen=True, array_like=True, gc=False, tag=2):
    """Where the bytes of these keys lie. `namespace`: keys of others are misses; `layers`: of each chunk only A to B; `pins`:
    none, one for all, or one for each, which reads what it pins even where a DELETE has hidden it. `is_ahead`: nobody waits for
    them yet. All are shown, or none: no extent and no size for any, where one would have to be waited for or is not stored."""

    keys: _Keys
    namespace: str | None = None
    layers: tuple[_Number, _Number] | None = None
    pins: Annotated[list[bytes | None], msgspec.Meta(max_length=KEYS_MAX)] = []
    is_ahead: bool = False


class Release(_Message, frozen=True, array_like=True, gc=False, tag=3):
    """Let go of extents. No reply."""

    handles: _Handles


class NewItem(_Message, frozen=True, array_like=True, gc=False):
    """A chunk to be stored. `id` and `parent` are raw ids or strings, as its namespace has them. `at`: where in the staging
    room its bytes are; nothing where room was reserved."""

    id: bytes | str
    size_bytes: _Number
    parent: bytes | str | None = None
    tokens: _Number | None = None
    digest: bytes | None = None
    at: _Number = 0


_Items = Annotated[list[NewItem], msgspec.Meta(max_length=KEYS_MAX)]
_Rooms = Annotated[list[_Number], msgspec.Meta(max_length=KEYS_MAX)]


class Stage(_Message, frozen=True, array_like=True, gc=False, tag=4):
    """Make a staging room of at least so many bytes, in place of the one before."""

    size_bytes: _Number


class Reserve(_Message, frozen=True, array_like=True, gc=False, tag=5):
    """Room in the arena for chunks that are committed together: for writers that are trusted."""

    namespace: str
    items: _Items
    durability: str | None = None


class Commit(_Message, frozen=True, array_like=True, gc=False, tag=6):
    """Make chunks visible in one step. `batch`: what `Reserved` called it, whose items it commits; 0: `items`, from the staging
    room, or each from one of `rooms` that `Prepared` told of. Those are used up, whatever is answered, unless they are refused for
    not being the items' rooms: then the connection still has them."""

    batch: _Number
    namespace: str = ""
    items: _Items = []
    durability: str | None = None
    rooms: _Rooms = []


class Abandon(_Message, frozen=True, array_like=True, gc=False, tag=7):
    """Give reserved room back. No reply."""

    batch: _Number


class Prepare(_Message, frozen=True, array_like=True, gc=False, tag=8):
    """Room in the arena for chunks that are not named yet, `count` of one size, in place of all that is left of what was prepared
    before: for writers that are trusted, and servers that have said that they know of it."""

    size_bytes: _Number
    count: _Number
    durability: str | None = None


Request = Hello | Open | Release | Stage | Reserve | Commit | Abandon | Prepare


# -- what a server says ------------------------------------------------------------------------------------------
class Welcome(_Message, frozen=True, array_like=True, gc=False, tag=1):
    """To `Hello`. Its bytes carry the descriptor of the control page. `opens_ahead`: it knows `Open.is_ahead`, and who does not
    say so would open what is nowhere at hand, as for a read. `prepares`: it knows `Prepare`."""

    version: int
    opens_ahead: bool = False
    prepares: bool = False


class Region(_Message, frozen=True, array_like=True, gc=False):
    """A region file, whose descriptor comes along. `life`: which of the arena's it is, where the client may write: a mapping of
    another life is not to be used for it, since it would keep room of that life from everybody."""

    number: int
    size_bytes: int
    life: int = 0


class Regions(_Message, frozen=True, array_like=True, gc=False, tag=2):
    """Before the reply that names them. The same number again: another file is behind it from here on."""

    regions: list[Region]


class Extent(_Message, frozen=True, array_like=True, gc=False):
    """`size_bytes` at `offset` of a region, under a handle to be released."""

    handle: int
    region: int
    offset: int
    size_bytes: int
    generation: int
    digest: bytes | None
    tier: str


class Opened(_Message, frozen=True, array_like=True, gc=False, tag=3):
    """To `Open`, in its order. Where there is no extent, `sizes` (empty where none is missing) tells of what is stored all the
    same: it is to be asked for again once others are released, or over HTTP. None in both: a miss."""

    extents: list[Extent | None]
    sizes: list[int | None] = []


class Staged(_Message, frozen=True, array_like=True, gc=False, tag=4):
    """To `Stage`. Its bytes carry the descriptor."""

    size_bytes: int


class ReservedRoom(_Message, frozen=True, array_like=True, gc=False):
    """Where a chunk's bytes go."""

    region: int
    offset: int
    size_bytes: int


class Reserved(_Message, frozen=True, array_like=True, gc=False, tag=5):
    """To `Reserve`: room for each item; None where a chunk is stored already and its bytes are not wanted."""

    batch: int
    rooms: list[ReservedRoom | None]


class StoredItem(_Message, frozen=True, array_like=True, gc=False):
    """What became of one chunk: as the reply of a PUT, or the error in its place (`status` other than 200)."""

    status: int
    existed: bool = False
    durability: str = ""
    etag: str = ""
    digest: bytes | None = None
    code: str = ""
    message: str = ""
    detail: dict[str, object] = {}


class Committed(_Message, frozen=True, array_like=True, gc=False, tag=6):
    """To `Commit`, in the order of its items."""

    items: list[StoredItem]


class Failed(_Message, frozen=True, array_like=True, gc=False, tag=7):
    """In place of any reply. The status and code are those that HTTP has for the error."""

    status: int
    code: str
    message: str
    detail: dict[str, object] = {}


class Prepared(_Message, frozen=True, array_like=True, gc=False, tag=8):
    """To `Prepare`, never `Failed`: all of the rooms, or none. They are numbered from `first` on."""

    first: int
    rooms: list[ReservedRoom]


Reply = Welcome | Regions | Opened | Staged | Reserved | Committed | Failed | Prepared


# -- how requests with names are read ----------------------------------------------------------------------------
_NIL: Final = msgspec.Raw(b"\xc0")
_BINARY: Final = frozenset({0xC4, 0xC5, 0xC6})
"""How bytes begin in msgpack, as opposed to strings."""


class _RawItem(_Message, frozen=True, array_like=True, gc=False):
    """A `NewItem` whose names are still as they came. msgspec decodes no union of bytes and strings, and with `Any` a few megabytes
    of nested arrays took seconds, and many times their size in memory: so they are passed over first, and typed then."""

    id: msgspec.Raw
    size_bytes: _Number
    parent: msgspec.Raw = _NIL
    tokens: _Number | None = None
    digest: bytes | None = None
    at: _Number = 0


_RawItems = Annotated[list[_RawItem], msgspec.Meta(max_length=KEYS_MAX)]


class _RawReserve(_Message, frozen=True, array_like=True, gc=False, tag=5):
    namespace: str
    items: _RawItems
    durability: str | None = None

    def typed(self) -> Reserve:
        return Reserve(self.namespace, _typed(self.items), self.durability)


class _RawCommit(_Message, frozen=True, array_like=True, gc=False, tag=6):
    batch: _Number
    namespace: str = ""
    items: _RawItems = []
    durability: str | None = None
    rooms: _Rooms = []

    def typed(self) -> Commit:
        return Commit(self.batch, self.namespace, _typed(self.items), self.durability, self.rooms)


_RawRequest = Hello | Open | Release | Stage | _RawReserve | _RawCommit | Abandon | Prepare


_text: Final[Callable[[msgspec.Raw], str | None]] = msgspec.msgpack.Decoder(str | None).decode
_binary: Final[Callable[[msgspec.Raw], bytes]] = msgspec.msgpack.Decoder(bytes).decode


def _typed(items: Sequence[_RawItem]) -> list[NewItem]:
    typed: list[NewItem] = []
    for item in items:
        name = _name(item.id)
        if name is None:
            raise msgspec.ValidationError("a chunk has an id")
        typed.append(NewItem(name, item.size_bytes, _name(item.parent), item.tokens, item.digest, item.at))
    return typed


def _name(raw: msgspec.Raw) -> bytes | str | None:
    return _binary(raw) if memoryview(raw)[0] in _BINARY else _text(raw)


encode = msgspec.msgpack.Encoder().encode
_decode_request: Final[Callable[[bytes], _RawRequest]] = msgspec.msgpack.Decoder(_RawRequest).decode
_decode_reply: Final[Callable[[bytes], Reply]] = msgspec.msgpack.Decoder(Reply).decode


def decode_request(raw: bytes) -> Request:
    """What a client says. `InvalidRequestError` for what is none of the above."""
    try:
        request = _decode_request(raw)
        return request.typed() if isinstance(request, _RawReserve | _RawCommit) else request
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"no message of a same-host client: {error}") from error


def decode_reply(raw: bytes) -> Reply:
    """What a server says. `UnavailableError` for what is none of the above: then this is not the server it was taken for."""
    try:
        return _decode_reply(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnavailableError("no message of a kvobj server", reason=str(error)) from error
