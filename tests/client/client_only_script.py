"""A program of somebody who has installed the client alone: argument 1 is the endpoint, 2 and 3 the keys.

Run by `test_client_alone.py`. Prints which modules of the site's packages it has loaded.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvobj.client import Credentials, KvClient, NewChunk, Session
from kvobj.client.aio import AsyncKvClient
from kvobj.client.ids import chunk_ids, lmcache

SITE = {Path(path) for path in sys.path if path.endswith("site-packages")}


async def read(endpoint: str, keys: Credentials) -> bytes:
    """The same chunk, awaited."""
    async with AsyncKvClient(endpoint, keys, "cache") as client:
        data = await client.get_chunk("alone/0")
        return b"" if data is None else bytes(data)


def main() -> None:
    """A round trip by each client, and what is told of the server that is not here."""
    endpoint, keys = sys.argv[1], Credentials(sys.argv[2], sys.argv[3])
    with KvClient(endpoint, keys, "cache") as client:
        client.mput([NewChunk(f"alone/{number}", b"bytes" * 100_000) for number in range(3)])
        with Session(client) as session:
            found = session.match(ids=[f"alone/{number}" for number in range(4)])
            assert found.answer.matched == 3
            assert found.pin is not None
            assert session.read(found.pin, "alone/2") is not None
    assert len(chunk_ids(bytes(32), bytes(32), bytes(64), chunk_tokens=4)) == 4 * len(lmcache.mp_root())
    assert asyncio.run(read(endpoint, keys)) == b"bytes" * 100_000
    loaded = {Path(module.__file__ or "") for module in sys.modules.values() if getattr(module, "__file__", None)}
    packages = {path.relative_to(site).parts[0] for site in SITE for path in loaded if path.is_relative_to(site)}
    print(*sorted(packages))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main()
