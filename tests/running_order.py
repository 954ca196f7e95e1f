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
    "replay/test_replay.py",
    "remote/test_toxics.py",
    "crash/test_crash.py",
    "unit/test_kernels_compile_for_gpus.py",
    "faults/test_gc_faults.py",
    "faults/test_damage_and_rebuild.py",
    "unit/test_gpu_lanes.py",
    "node/test_shared_class_outages.py",
    "workers/test_worker_processes.py",
    "contract/test_remote_tier.py",
    "model/test_protocol_model.py",
    "clients/test_lmcache_plugins.py",
    "clients/test_command_lines.py",
    "remote/test_remote_rebuild.py",
    "clients/test_python_clients.py",
    "connectors/test_link.py",
    "faults/test_full_store.py",
    "remote/test_toxics_of_a_node.py",
    "contract/test_wrapped_tiers.py",
    "unit/test_codec_bench.py",
    "crash/test_transcoding_crash.py",
    "clients/test_transformers.py",
    "clients/test_transformers_models.py",
    "clients/test_lmcache.py",
    "lm/test_lm_server.py",
    "node/test_remote_eviction.py",
    "node/test_restarts.py",
    "remote/test_kill_in_upload.py",
    "client/test_client_restarts.py",
    "unit/test_device_codecs.py",
    "stateful/test_lease_machine.py",
    "remote/test_federation_chains.py",
    "clients/test_javascript.py",
    "clients/test_vllm_tier.py",
    "remote/test_bucket_odd_replies.py",
    "node/test_demo_codecs.py",
    "remote/test_remote_troubles.py",
    "remote/test_endings_beside_silence.py",
    "node/test_remote_reads.py",
    "remote/test_misplaced_data_directories.py",
)
"""By the seconds that they took, the longest first; what is missing here comes after them. It need not be exact."""
_RANKS: Final = {f"tests/{name}": rank for rank, name in enumerate(_LONG)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The same order in every process: pytest-xdist wants that."""
    if _IS_ONE_OF_SEVERAL:
        items.sort(key=lambda item: _RANKS.get(item.nodeid.partition("::")[0], len(_RANKS)))
