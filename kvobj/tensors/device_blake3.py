"""BLAKE3 of inputs in a launcher's memory, many of one length in each launch (`kernels/blake3.cuh`). For devices: on a CPU the
blake3 package is several times faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from kvobj.tensors.head_reports import address_table
from kvobj.tensors.kernels.launcher import Address, Launcher

DIGEST_BYTES: Final = 32
LONGEST: Final = 2**41
"""Bytes of an input."""
_CHUNK: Final = 1024
_LANES: Final = 32


def digests(launcher: Launcher, inputs: Sequence[Address], length: int) -> list[bytes]:
    """The digest of each input, all `length` bytes long, at addresses that are multiples of 4. Returns when they are known.

    ValueError for a length beyond `LONGEST`.
    """
    if not 0 <= length <= LONGEST:
        raise ValueError(f"length {length} is not from 0 to {LONGEST}")
    if not length or not inputs:
        return [blake3().digest()] * len(inputs)
    nodes = -(-length // _CHUNK)
    values = launcher.scratch("blake3.values", DIGEST_BYTES * nodes * len(inputs))
    spare = launcher.scratch("blake3.parents", DIGEST_BYTES * -(-nodes // 2) * len(inputs))
    table = address_table(launcher, "blake3.inputs", map(int, inputs))
    last = length - (nodes - 1) * _CHUNK
    launcher.launch("blake3_chunks", -(-nodes // _LANES) * len(inputs), table, nodes, last, values)
    while nodes > 1:
        parents = -(-nodes // 2)
        launcher.launch("blake3_parents", -(-parents // _LANES) * len(inputs), values, nodes, spare)
        values, spare, nodes = spare, values, parents
    found = bytearray(DIGEST_BYTES * len(inputs))
    launcher.download(values, memoryview(found))
    return [bytes(found[at : at + DIGEST_BYTES]) for at in range(0, len(found), DIGEST_BYTES)]
