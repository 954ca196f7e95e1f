"""From what a request calls chunks (ids, keys, tokens) to their S3 keys, and back. Pure; source: `kv-api` §2.

In a namespace with `ids: kvobj` a chunk is called by its id, which is its key in hex. In other declared namespaces it is called by
a key that stands behind `NAME/` in S3; where that is an engine's digest of 32 bytes, a list may hold the digests themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, cast

import msgspec

from kvobj.catalog.chunk_list import ChunkList, IdList, KeyList
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import MAX_KEY_BYTES
from kvobj.errors import BatchTooLargeError, InvalidChunkIdError, InvalidRequestError
from kvobj.ids.chunk_ids import CHUNK_ID_BYTES, TOKEN_BYTES, chunk_ids, is_chunk_id
from kvobj.ids.engine_chains.server import ENGINE_CHAINS, EngineChain, engine_keys
from kvobj.store.chunk_values import OpenNamespace
from kvobj.store.places import DEFAULT_NAMESPACE

MAX_CHUNKS: Final = 65_536
"""How many chunks one call may name."""


class _Salted(msgspec.Struct):
    salt: str = ""


_salt = lru_cache(maxsize=1024)(lambda declaration: msgspec.json.decode(declaration, type=_Salted).salt)


def has_raw_ids(namespace: NamespaceRow) -> bool:
    """Whether a chunk of the namespace may be called by 32 raw bytes."""
    return namespace.ids == "kvobj" or namespace.ids in ENGINE_CHAINS


def front_of(namespace: NamespaceRow) -> str:
    """What stands in front of a chunk's name in its S3 key."""
    return "" if namespace.ids == "kvobj" or namespace.name == DEFAULT_NAMESPACE else f"{namespace.name}/"


def chunks_of_ids(namespace: NamespaceRow, ids: bytes) -> ChunkList:
    """Chunks called by raw ids, end to end. `InvalidChunkIdError` in a namespace whose names are other strings."""
    if namespace.ids == "kvobj":
        return IdList(ids)
    if not has_raw_ids(namespace):
        raise InvalidChunkIdError("the chunks of this namespace are called by strings")
    front = front_of(namespace)
    text = ids.hex()
    step = 2 * CHUNK_ID_BYTES
    return KeyList([front + text[at : at + step] for at in range(0, len(text), step)])


def chunks_of_names(namespace: NamespaceRow, names: Sequence[str]) -> ChunkList:
    """Chunks called by strings: foreign keys without their `NAME/`. `InvalidChunkIdError` for one that cannot be a key."""
    return KeyList([key_of(namespace, name) for name in names])


def key_of(namespace: NamespaceRow, name: str) -> str:
    """The S3 key of one chunk. `InvalidChunkIdError`."""
    if namespace.ids == "kvobj":
        if not is_chunk_id(name):
            raise InvalidChunkIdError("a chunk id is 64 lower-case hex digits")
        return name
    key = front_of(namespace) + name
    if not name or "\0" in name or len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise InvalidChunkIdError("a key has 1 to 1024 bytes with its namespace's name, and no NUL")
    return key


def count_of_tokens(namespace: NamespaceRow, tokens: bytes) -> int:
    """How many chunks a sequence makes. `InvalidRequestError` where only its engine can name them, `BatchTooLargeError`."""
    if not has_raw_ids(namespace):
        raise InvalidRequestError("the ids of this namespace cannot be computed from tokens", field="tokens")
    count = -(-len(tokens) // (namespace.chunk_tokens * TOKEN_BYTES))
    if count > MAX_CHUNKS:
        raise BatchTooLargeError(f"a call names at most {MAX_CHUNKS} chunks", limit=MAX_CHUNKS, given=count)
    return count


def chunks_of_tokens(namespace: OpenNamespace, tokens: bytes) -> ChunkList:
    """The chunks of a sequence of tokens (little-endian u32), one of kvobj's own also where it is not full.

    Work: about 1 µs a chunk and 1 µs a KiB of tokens; engines' chains ten times that. Errors as `count_of_tokens`.
    """
    row = namespace.row
    count_of_tokens(row, tokens)
    if row.ids == "kvobj":
        return IdList(chunk_ids(namespace.key, row.root, tokens, chunk_tokens=row.chunk_tokens, partial_last=True))
    keys = engine_keys(cast("EngineChain", row.ids), tokens, chunk_tokens=row.chunk_tokens, salt=_salt(row.declaration))
    front = front_of(row)
    return KeyList([front + key for key in keys])
