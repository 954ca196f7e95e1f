"""Lists of chunks as requests give them, in either format, and chunks as replies name them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvobj.api.kv.bodies import check_count, ids_of
from kvobj.catalog.chunk_list import ChunkList, IdList, KeyList
from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import MAX_KEY_BYTES
from kvobj.errors import InvalidChunkIdError
from kvobj.store.chunk_naming import chunks_of_ids, chunks_of_names, front_of


def chunk_list(namespace: NamespaceRow | None, ids: bytes | Sequence[str]) -> ChunkList:
    """The chunks of a list. Without a namespace they are named by S3 keys, or by raw ids, whose keys are their hex digits.

    Raises `BatchTooLargeError` and `InvalidChunkIdError`.
    """
    if isinstance(ids, bytes):
        raw = ids_of(ids)
        return IdList(raw) if namespace is None else chunks_of_ids(namespace, raw)
    if namespace is not None and namespace.ids == "kvobj":
        return IdList(ids_of(ids))
    check_count(len(ids))
    if namespace is not None:
        return chunks_of_names(namespace, ids)
    for key in ids:
        if not key or "\0" in key or len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
            raise InvalidChunkIdError("a key has 1 to 1024 bytes and no NUL")
    return KeyList(ids)


def namer(namespace: NamespaceRow | None, *, raw: bool) -> Callable[[str], str | bytes]:
    """What a reply calls the chunk under a key; `raw`: ids are bytes in it."""
    if namespace is None:
        return str
    if namespace.ids == "kvobj":
        return bytes.fromhex if raw else str
    front = front_of(namespace)
    return lambda key: key.removeprefix(front)
