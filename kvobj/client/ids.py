"""What chunks are called, computed from tokens alone: kvobj's own ids and the hash chains of engines. Pure; no server is asked.

Who has a `Namespace` asks it (`Namespace.chunk_ids`); these are for those who have its key and root and nothing else. Which
release of an engine each chain was read at, and its test vectors: docs/formats.md. Dynamo's chain, and vLLM's where it hashes with
XXH3, need the extra `engines`.
"""

from __future__ import annotations

from kvobj.ids.chunk_ids import (
    CHUNK_ID_BYTES,
    Tokens,
    chunk_id,
    chunk_ids,
    is_chunk_id,
    namespace_root,
    parse_chunk_id,
    token_bytes,
)
from kvobj.ids.engine_chains import aibrix, dynamo, llm_d, lmcache, sglang, vllm
from kvobj.ids.engine_chains.server import engine_keys

__all__ = [
    "CHUNK_ID_BYTES",
    "Tokens",
    "aibrix",
    "chunk_id",
    "chunk_ids",
    "dynamo",
    "engine_keys",
    "is_chunk_id",
    "llm_d",
    "lmcache",
    "namespace_root",
    "parse_chunk_id",
    "sglang",
    "token_bytes",
    "vllm",
]
