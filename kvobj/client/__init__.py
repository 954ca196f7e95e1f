"""The client of a kvobj server: signed HTTP with nothing but the standard library.

Imports nothing of the server, so that it can be used where no server is installed.
"""

from __future__ import annotations

from kvobj.client.admin import AdminClient
from kvobj.client.connection import Answer, Endpoint, SignedConnection
from kvobj.client.credentials import Credentials
from kvobj.client.s3 import S3Client

__all__ = ["AdminClient", "Answer", "Credentials", "Endpoint", "S3Client", "SignedConnection"]
