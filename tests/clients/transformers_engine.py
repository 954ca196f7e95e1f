"""What the tests of the connector of transformers share: a server with its bucket, and an engine's process with stores of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from engine_process import EngineProcess
from server_process import MIB, REPOSITORY, BucketSetting, ServerProcess, ServerSettings

CHUNK_TOKENS: Final = 16
ENVIRONMENT: Final = {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def sequence(length: int, seed: int) -> list[int]:
    """Token ids of a prompt."""
    drawn = random.Random(seed)
    return [drawn.randrange(199) for _ in range(length)]


def settings_of(server: ServerProcess, seconds: float = 10.0) -> dict[str, Any]:
    """`LinkSettings` for the server."""
    keys = server.credentials()
    return {
        "endpoint": server.endpoint,
        "bucket": "cache",
        "access_key": keys.access_key,
        "secret_key": keys.secret_key,
        "timeout_seconds": seconds,
        "rest_seconds": 0.05,
        "rest_seconds_max": 0.2,
    }


def server_in(directory: Path) -> ServerProcess:
    """A server with the bucket."""
    buckets = (BucketSetting("cache", "kv", "memory"),)
    return ServerProcess(directory, ServerSettings(dram_bytes=64 * MIB, nvme_bytes=256 * MIB, buckets=buckets))


def opened(
    engine: EngineProcess,
    server: ServerProcess,
    store: str,
    /,
    *,
    model: str | None = None,
    seconds: float = 10.0,
    **options: Any,  # noqa: ANN401 - PrefixCache's
) -> str:
    """Open a store of a model in the engine's process, by default of that of the store's name; its namespace."""
    fields = {"chunk_tokens": CHUNK_TOKENS, "salt": store, **options}
    settings = settings_of(server, seconds)
    namespace: str = engine.ask("open", store=store, model=model or store, settings=settings, **fields)
    return namespace
