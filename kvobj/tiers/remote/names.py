"""What things are called on the remote: the keys of blobs, manifests and the store's own file under the configured key prefix.

    {prefix}blobs/{blob id, 32 hex}/{bucket}/{key}[~][~{codec}-{plain bytes}]
    {prefix}manifests/…        {prefix}store.json

The blob id comes first, so that LIST gives ids ascending and one epoch's, or one blob's, objects have a key prefix of their own.
What follows is for people: bucket and object key in safe characters alone, everything else percent-escaped, the whole at most 900
bytes. A slash of the key stays one where something stands on both sides of it; `..` and empty segments never come about. A `~`,
which no escaped text has, says that the key was cut, or in which codec the frame lies where readers are to be given it decoded.

Pure. Names that nobody here gives are told from ours, and are nobody's business here: `parse` has no answer for them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from urllib.parse import quote, unquote

from kvobj.ids import BLOB_ID_BYTES, BlobId
from kvobj.tiers.protocol import BlobNames

KEY_BYTES_MAX: Final = 900
"""S3 has 1024; servers that keep keys in files, and proxies, have less."""
SEGMENT_BYTES_MAX: Final = 200
"""Of what stands between two slashes of a key, for servers that make files of them: 255 are common, and a mark may follow."""
PREFIX_BYTES_MAX: Final = 256

_BLOBS: Final = "blobs/"
_ID_DIGITS: Final = 2 * BLOB_ID_BYTES
_CODEC_SAFE: Final = "."
_SEGMENT: Final = r"(?:[A-Za-z0-9._-]|%[0-9A-F]{2})+"
_NAME: Final = re.compile(
    rf"(?P<bucket>{_SEGMENT})/(?P<key>{_SEGMENT}(?:/{_SEGMENT})*)(?P<cut>~)?"
    r"(?:~(?P<codec>(?:[a-z0-9.]|%[0-9A-F]{2})+)-(?P<plain>0|[1-9][0-9]{0,18}))?",
    re.ASCII,
)
_BLOB: Final = re.compile(rf"([0-9a-f]{{{_ID_DIGITS}}})/(.*)", re.ASCII | re.DOTALL)
_TOKEN: Final = re.compile(r"%[0-9A-F]{2}|.")
_CONTINUATION: Final = re.compile(r"%[89AB][0-9A-F]")


@dataclass(frozen=True, slots=True)
class CodedNames(BlobNames):
    """Names of a blob whose frame goes to the remote in another codec than readers are given, and what it decodes to."""

    codec: str
    plain_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteName:
    """What a blob's key says. `name` is what stands behind the blob id; where `is_cut`, the object's key begins with that of
    `names` and goes on."""

    blob_id: BlobId
    name: str
    names: BlobNames
    is_cut: bool


class RemoteNames:
    """The keys under one prefix: empty, or ending in a slash, at most 256 bytes (ValueError otherwise)."""

    __slots__ = ("_room", "blobs", "manifests", "prefix", "store")

    def __init__(self, prefix: str) -> None:
        if (prefix and not prefix.endswith("/")) or len(prefix.encode()) > PREFIX_BYTES_MAX:
            raise ValueError(f"not a key prefix: {prefix!r}")
        self.prefix = prefix
        self.blobs = f"{prefix}{_BLOBS}"
        self.manifests = f"{prefix}manifests/"
        self.store = f"{prefix}store.json"
        self._room = KEY_BYTES_MAX - len(self.blobs.encode()) - _ID_DIGITS - 1

    def name(self, names: BlobNames) -> str:
        """What stands behind the blob id. ValueError for an empty bucket or key."""
        if not names.bucket or not names.key:
            raise ValueError(f"a blob has a bucket and a key, not {names}")
        bucket, mark = _escaped(names.bucket, slash=False), ""
        if isinstance(names, CodedNames):
            mark = f"~{quote(names.codec, safe=_CODEC_SAFE)}-{names.plain_bytes}"
        key = _escaped(names.key, slash=True)
        room = self._room - len(bucket) - 1 - len(mark)
        return f"{bucket}/{_cut(key, room)}{mark}"

    def key(self, blob_id: BlobId, name: str) -> str:
        """The whole key of a blob."""
        return f"{self.blobs}{blob_id.hex()}/{name}"

    def of_blob(self, blob_id: BlobId) -> str:
        """The key prefix of one blob's keys: of the one that it has, where all is well."""
        return f"{self.blobs}{blob_id.hex()}/"

    def of_epoch(self, epoch: int) -> str:
        """The key prefix of the blobs of one session epoch."""
        return f"{self.blobs}{epoch:016x}"

    def parse(self, key: str) -> RemoteName | None:
        """What a whole key says, or None where it is no blob's."""
        if not key.startswith(self.blobs):
            return None
        found = _BLOB.fullmatch(key, len(self.blobs))
        if found is None:
            return None
        names = parse_name(found[2])
        if names is None:
            return None
        return RemoteName(BlobId(bytes.fromhex(found[1])), found[2], names[0], names[1])


def parse_name(name: str) -> tuple[BlobNames, bool] | None:
    """What stands behind a blob id, read back, and whether the key was cut; None where `RemoteNames.name` gives no such name."""
    found = _NAME.fullmatch(name)
    if found is None or ".." in name:
        return None
    try:
        bucket, key = unquote(found["bucket"], errors="strict"), unquote(found["key"], errors="strict")
    except UnicodeDecodeError:
        return None
    is_cut = found["cut"] is not None
    codec, plain_bytes = found["codec"], found["plain"]
    if codec is None:
        return BlobNames(bucket, key), is_cut
    return CodedNames(bucket, key, unquote(codec), int(plain_bytes)), is_cut


def coded_by(name: str) -> tuple[str, int] | None:
    """The codec and the plain bytes that a name of ours says, None of one whose frame lies as readers are given it. For each read:
    0.1 µs of a plain one."""
    mark = name.rfind("~") + 1
    if mark in (0, len(name)):
        return None
    codec, _, plain_bytes = name[mark:].partition("-")
    return unquote(codec), int(plain_bytes)


def _escaped(text: str, *, slash: bool) -> str:
    """Safe characters alone, with slashes (where `slash` lets them) between segments that are not empty, none of them `.` nor with
    `..` in it."""
    parts = [quote(part, safe="").replace("~", "%7E") for part in text.split("/")]
    joined = parts[0]
    for before, part in pairwise(parts):
        joined += ("/" if slash and before and part else "%2F") + part
    return "/".join([_without_dots(segment) for segment in joined.split("/")])


def _without_dots(segment: str) -> str:
    return segment.replace(".", "%2E") if segment == "." or ".." in segment else segment


def _cut(key: str, room: int) -> str:
    """The escaped key if it fits and none of its segments is too long; else so much of its front as does, and a `~`. Nothing is cut
    in two: no escape, no character of several bytes."""
    stop, start = len(key), 0
    if stop > room:
        stop = room - 1
    for segment in key.split("/"):
        if start + SEGMENT_BYTES_MAX >= stop:
            break
        if len(segment) > SEGMENT_BYTES_MAX:
            stop = start + SEGMENT_BYTES_MAX
            break
        start += len(segment) + 1
    if stop >= len(key):
        return key
    end = 0
    for token in _TOKEN.finditer(key):
        if token.start() > stop:
            break
        if _CONTINUATION.fullmatch(token[0]) is None:
            end = token.start()
    return key[:end].rstrip("/.") + "~"
