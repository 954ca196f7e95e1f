"""What LMCache's chunks are called in the store. Pure; LMCache's key classes are taken as they come.

The names are those that LMCache's own S3 adapter gives (`l2_adapters/s3_l2_adapter.py`, 0.5.6), so that chunks which it wrote into
the same bucket are found under them, and the other way round: `MODEL@KV_RANK@GROUP@HASH`, and `@SALT` behind it where there is
one; rank as eight hex digits, group in hex, the hash in lower-case hex. Neither model nor salt has an `@`.

A model whose name climbs out by `..` (a path: `../models/x`) would climb out of the bucket, and no such key can be sent. Its `..`
are `@` here, which no name of a model has: `@/models/x@…`. S3's adapter cannot store such a model either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

_NAME: Final = re.compile(r"((?:@/|[^@])+)@([0-9a-f]{8})@([0-9a-f]+)@((?:[0-9a-f]{2})+)(?:@([^@/\\\0]{1,128}))?")
_ENGINE_MODEL: Final = re.compile(r"(?:@/|[^@])+(?=@)")
_NAME_BYTES_MAX: Final = 1024

HEALTH_CHECK: Final = "test@1@0@0@bfloat16"
"""The name of the one key by which LMCache finds out whether a remote backend is well again: `CacheEngineKey("test", 1, 0, 0,
bfloat16)` in `v1/health_monitor/checks/remote_backend_check.py`, 0.5.6. It is put with whatever lies in memory, and has to come
back with the bytes of that very put: until then LMCache uses no backend that failed."""


@dataclass(frozen=True, slots=True)
class ObjectName:
    """A name taken apart, with the fields of LMCache's `EncodedObjectKey`."""

    model_name: str
    kv_rank: int
    object_group_id: int
    chunk_hash_hex: str
    cache_salt: str

    @classmethod
    def parse(cls, name: str) -> ObjectName | None:
        """None for what is no name of a chunk of LMCache's multi-process server."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        text, rank, group, chunk_hash, salt = found.groups()
        model = _model_of(text)
        if "@" in model or _text_of(model) != text:
            return None
        return cls(model, int(rank, 16), int(group, 16), chunk_hash, salt or "")


def object_name(key: Any) -> str:  # noqa: ANN401 - LMCache's ObjectKey
    """The name of an `ObjectKey` (`v1/distributed/api.py`)."""
    name = f"{_text_of(key.model_name)}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
    return f"{name}@{key.cache_salt}" if key.cache_salt else name


def model_prefix(model_name: str | None) -> str:
    """What the names of a model's chunks begin with; of all models' for None."""
    return f"{_text_of(model_name)}@" if model_name else ""


def may_be_cursor(text: str) -> bool:
    """Whether a listing may go on behind this: whatever could be a name."""
    try:
        return "\0" not in text and len(text.encode()) <= _NAME_BYTES_MAX
    except UnicodeEncodeError:
        return False


def engine_name(key: Any, *, is_shared_by_ranks: bool) -> str:  # noqa: ANN401 - LMCache's CacheEngineKey
    """The name of a `CacheEngineKey` or of one of a single layer (`lmcache/utils.py`), which is its `to_string`, but that a model's
    name does not climb out. Of a model whose ranks all hold the same bytes (MLA), rank 0 writes them for all, and its name is that
    of every rank."""
    model, world, rank, rest = key.to_string().split("@", 3)
    return f"{_text_of(model)}@{world}@{'0' if is_shared_by_ranks else rank}@{rest}"


def plain_engine_name(name: str) -> str:
    """What LMCache calls what has such a name, of rank 0 where all ranks share it."""
    found = _ENGINE_MODEL.match(name)
    return name if found is None else _model_of(found[0]) + name[found.end() :]


def _text_of(model_name: str) -> str:
    """A model's name as it stands in the names of its chunks."""
    if ".." not in model_name:
        return model_name
    segments, depth, climbs = model_name.split("/"), 0, False
    for segment in segments[:-1]:  # behind the last one more follows
        depth += -1 if segment == ".." else segment not in ("", ".")
        climbs = climbs or depth < 0
    if not climbs:
        return model_name
    return "/".join([*("@" if each == ".." else each for each in segments[:-1]), segments[-1]])


def _model_of(text: str) -> str:
    return "/".join(".." if segment == "@" else segment for segment in text.split("/"))
