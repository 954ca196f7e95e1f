"""In which order files of tests run where several processes share them, as in `make test` (pytest-xdist, `--dist loadfile`).

A file's tests stay together in one process, for what a module of them shares: a server, a compiled library. Files that take
long come first, so that none is left over when the others have nothing more to do. A run in one process is as it was collected.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

_IS_ONE_OF_SEVERAL: Final = "PYTEST_XDIST_WORKER" in os.environ
_LONG: Final = (
    "remote/test_toxics.py",
    "unit/test_kernels_compile_for_gpus.py",
    "faults/test_gc_faults.py",
    "workers/test_worker_processes.py",
    "replay/test_replay.py",
    "crash/test_crash.py",
    "contract/test_remote_tier.py",
    "node/test_shared_class_outages.py",
    "unit/test_gpu_lanes.py",
    "stateful/test_lease_machine.py",
    "clients/test_lmcache_plugins.py",
    "remote/test_toxics_of_a_node.py",
    "crash/test_transcoding_crash.py",
    "faults/test_damage_and_rebuild.py",
    "connectors/test_link.py",
    "clients/test_command_lines.py",
    "contract/test_wrapped_tiers.py",
    "remote/test_remote_rebuild.py",
    "clients/test_transformers.py",
    "node/test_remote_eviction.py",
    "clients/test_python_clients.py",
    "node/test_restarts.py",
    "remote/test_kill_in_upload.py",
    "clients/test_lmcache.py",
    "remote/test_federation_chains.py",
    "clients/test_javascript.py",
    "clients/test_vllm_tier.py",
    "remote/test_bucket_odd_replies.py",
    "model/test_protocol_model.py",
    "node/test_demo_codecs.py",
    "remote/test_remote_troubles.py",
    "remote/test_review_of_endings.py",
    "unit/test_codec_bench.py",
    "node/test_remote_reads.py",
    "remote/test_review_of_restores.py",
)
"""By the seconds that they took, the longest first; what is missing here comes after them. It need not be exact."""
_RANKS: Final = {f"tests/{name}": rank for rank, name in enumerate(_LONG)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The same order in every process: pytest-xdist wants that."""
    if _IS_ONE_OF_SEVERAL:
        items.sort(key=lambda item: _RANKS.get(item.nodeid.partition("::")[0], len(_RANKS)))
