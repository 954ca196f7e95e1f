"""What LMCache's chunks are called in the store. Pure; LMCache's key classes are taken as they come.

The names are those that LMCache's own S3 adapter gives (`l2_adapters/s3_l2_adapter.py`, 0.5.6), so that chunks which it wrote into
the same bucket are found under them, and the other way round: `MODEL@KV_RANK@GROUP@HASH`, and `@SALT` behind it where there is
one; rank as eight hex digits, group in hex, the hash in lower-case hex. Neither model nor salt has an `@`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

_NAME: Final = re.compile(r"([^@]+)@([0-9a-f]{8})@([0-9a-f]+)@((?:[0-9a-f]{2})+)(?:@([^@/\\\0]{1,128}))?")

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
        model, rank, group, chunk_hash, salt = found.groups()
        return cls(model, int(rank, 16), int(group, 16), chunk_hash, salt or "")


def object_name(key: Any) -> str:  # noqa: ANN401 - LMCache's ObjectKey
    """The name of an `ObjectKey` (`v1/distributed/api.py`)."""
    name = f"{key.model_name}@{key.kv_rank:08x}@{key.object_group_id:x}@{key.chunk_hash.hex()}"
    return f"{name}@{key.cache_salt}" if key.cache_salt else name


def model_prefix(model_name: str | None) -> str:
    """What the names of a model's chunks begin with; of all models' for None."""
    return f"{model_name}@" if model_name else ""


def engine_name(key: Any, *, is_shared_by_ranks: bool) -> str:  # noqa: ANN401 - LMCache's CacheEngineKey
    """The name of a `CacheEngineKey` or of one of a single layer (`lmcache/utils.py`), which is its `to_string`. Of a model whose
    ranks all hold the same bytes (MLA), rank 0 writes them for all, and its name is that of every rank."""
    name: str = key.to_string()
    if not is_shared_by_ranks:
        return name
    model, world, _, rest = name.split("@", 3)
    return f"{model}@{world}@0@{rest}"
