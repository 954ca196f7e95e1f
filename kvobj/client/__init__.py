"""The client of a kvobj server: signed HTTP with nothing but the standard library, msgspec and BLAKE3.

Imports nothing of the server, so that it can be used where no server is installed.
"""

from __future__ import annotations

from kvobj.client.admin import AdminClient
from kvobj.client.connection import Answer, Endpoint, SignedConnection
from kvobj.client.credentials import Credentials
from kvobj.client.kv import KvClient
from kvobj.client.kv_values import Event, Name, Namespace, NewChunk
from kvobj.client.lease import Lease
from kvobj.client.s3 import S3Client
from kvobj.client.session import Pin, PinnedMatch, Session

__all__ = [
    "AdminClient",
    "Answer",
    "Credentials",
    "Endpoint",
    "Event",
    "KvClient",
    "Lease",
    "Name",
    "Namespace",
    "NewChunk",
    "Pin",
    "PinnedMatch",
    "S3Client",
    "Session",
    "SignedConnection",
]
