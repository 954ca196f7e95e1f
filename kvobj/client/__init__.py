"""The client of a kvobj server: signed HTTP with nothing but the standard library, msgspec and BLAKE3 (docs/client.md).

Imports nothing of the server, so that it can be used where no server is installed. `kvobj.client.aio` is the same for asyncio,
`kvobj.client.ids` what chunks are called; `kvobj.errors` is what the calls raise.
"""

from __future__ import annotations

from kvobj.client.admin import AdminClient
from kvobj.client.connection import Answer, Endpoint, SignedConnection
from kvobj.client.credentials import Credentials
from kvobj.client.kv import KvClient
from kvobj.client.kv_values import (
    DEFAULT,
    ROOT,
    Buffer,
    ChunkDetail,
    Event,
    Explanation,
    MatchAnswer,
    Name,
    Namespace,
    NewChunk,
    ReadChunk,
    StoredBytes,
    StoredChunk,
    StoredPart,
)
from kvobj.client.lease import Lease
from kvobj.client.pins import Pin
from kvobj.client.retry import RetryRule
from kvobj.client.s3 import S3Client
from kvobj.client.session import PinnedMatch, Session
from kvobj.client.views import ChunkView

__all__ = [
    "DEFAULT",
    "ROOT",
    "AdminClient",
    "Answer",
    "Buffer",
    "ChunkDetail",
    "ChunkView",
    "Credentials",
    "Endpoint",
    "Event",
    "Explanation",
    "KvClient",
    "Lease",
    "MatchAnswer",
    "Name",
    "Namespace",
    "NewChunk",
    "Pin",
    "PinnedMatch",
    "ReadChunk",
    "RetryRule",
    "S3Client",
    "Session",
    "SignedConnection",
    "StoredBytes",
    "StoredChunk",
    "StoredPart",
]
