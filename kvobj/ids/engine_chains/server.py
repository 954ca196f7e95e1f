"""The engine chains that a namespace's `ids` may name: the server computes their keys from token ids (`kv-api` §3).

All have 128 bits or more and need nothing but the core dependencies. The namespace's `salt` is the engine's cache salt where
the engine hashes one; LMCache keeps it outside of its hash, so there it changes nothing. Adapters are part of these engines'
names in ways that a declaration does not tell, so such namespaces have none.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from kvobj.ids.engine_chains import lmcache, sglang, vllm
from kvobj.ids.engine_chains.spans import tokens_of

EngineChain = Literal["lmcache", "vllm-sha256-cbor", "sglang-sha256"]
ENGINE_CHAINS: Final[tuple[str, ...]] = get_args(EngineChain)


def engine_keys(chain: EngineChain, tokens: bytes, *, chunk_tokens: int, salt: str = "") -> list[str]:
    """The keys (hex digests, as the engines print them) of all full chunks. `tokens` are little-endian u32."""
    ids = tokens_of(tokens)
    digests: list[bytes]
    match chain:
        case "lmcache":
            digests = lmcache.mp_chunk_hashes(ids, chunk_tokens=chunk_tokens)
        case "vllm-sha256-cbor":
            extras = vllm.Extras(cache_salt=salt)
            digests = vllm.block_hashes(ids, block_tokens=chunk_tokens, algorithm="sha256_cbor", extras=extras)
        case "sglang-sha256":
            seed = sglang.namespace_seed(cache_salt=salt or None)
            digests = sglang.page_hashes(ids, page_tokens=chunk_tokens, parent=seed, partial_last=False)
    return [digest.hex() for digest in digests]
