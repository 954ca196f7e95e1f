"""kvobj: a tiered, content-addressed object store for KV-cache chunks, with an S3-compatible API.

Importing this package imports nothing heavy: no torch, cupy, aiohttp or asyncpg.
"""

__version__ = "0.1.0"
