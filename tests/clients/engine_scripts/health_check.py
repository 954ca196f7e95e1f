"""LMCache's own health check of a remote backend, at the moment at which it asks whether one that failed is well again."""

from __future__ import annotations

from typing import Any

from command_lines import body_of
from lmcache.v1.health_monitor.checks.remote_backend_check import RemoteBackendHealthCheck

USED_BEFORE = 16


def is_well(backend: Any) -> bool:  # noqa: ANN401 - LMCache's class
    """Whether the check passes, as LMCache makes it every half a minute."""
    return bool(RemoteBackendHealthCheck(backend).check())


def recovers(backend: Any, seed: int) -> bool:  # noqa: ANN401 - LMCache's class
    """Whether the backend is used again. What the check puts is what lies in memory: bytes of this seed, as of chunks that were in
    use before."""
    connector = backend.connection.getWrappedConnector()
    form = (connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
    used = [backend.local_cpu_backend.allocate(*form) for _ in range(USED_BEFORE)]
    for number, memory in enumerate(used):
        memory.byte_array.cast("B")[:] = body_of(memory.get_size(), seed * USED_BEFORE + number)
    for memory in used:
        memory.ref_count_down()
    check = RemoteBackendHealthCheck(backend)
    check.failure_time = 0.0  # so that it has waited for long enough
    return bool(check.check())
