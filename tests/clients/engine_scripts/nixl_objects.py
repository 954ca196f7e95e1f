"""NIXL's OBJ plugin as vLLM's `obj` tier, SGLang's `nixl` back end and llm-d drive it: host memory to objects and back.

Run in `.envs/engines`; see `command_lines` for how. One agent a `open`, so that each setting gets a client of its own.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from command_lines import body_of, digest_of, serve
from nixl_cu12._api import nixl_agent, nixl_agent_config

TRANSFER_SECONDS = 30.0
PAUSE_SECONDS = 0.0005
agents: dict[str, Any] = {}
kept: list[object] = []
"""Memory of transfers that failed: a piece of one may still be on its way when the first error is told."""


def open_agent(name: str, parameters: dict[str, str]) -> None:
    """A new agent with the OBJ back end; `parameters` are the plug-in's own."""
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.create_backend("OBJ", parameters)
    agents[name] = agent


def transfer(name: str, operation: str, pieces: list[tuple[np.ndarray[Any, Any], str, int]]) -> str:
    """Move each (memory, key, offset) as one transfer; the state it ends in, `DONE` or `ERR`."""
    agent = agents[name]
    memory = [(piece.ctypes.data, piece.nbytes, 0) for piece, _key, _offset in pieces]
    host = agent.register_memory([(*where, "") for where in memory], "DRAM", backends=["OBJ"])
    objects = agent.register_memory(
        [(0, offset + piece.nbytes, device, key) for device, (piece, key, offset) in enumerate(pieces, start=1)],
        "OBJ",
        backends=["OBJ"],
    )
    handle = agent.initialize_xfer(
        operation,
        agent.get_xfer_descs(memory, "DRAM"),
        agent.get_xfer_descs(
            [(offset, piece.nbytes, device) for device, (piece, _key, offset) in enumerate(pieces, start=1)], "OBJ"
        ),
        name,
    )
    try:
        state = agent.transfer(handle)
        deadline = time.monotonic() + TRANSFER_SECONDS
        while state == "PROC" and time.monotonic() < deadline:
            time.sleep(PAUSE_SECONDS)
            state = agent.check_xfer_state(handle)
    except Exception as error:  # noqa: BLE001 - how the binding says that a transfer failed
        state = f"ERR {type(error).__name__}"
    if state == "DONE":
        agent.release_xfer_handle(handle)
        agent.deregister_memory(host, backends=["OBJ"])
        agent.deregister_memory(objects, backends=["OBJ"])
    else:
        kept.append((pieces, handle, host, objects))
    return str(state)


def write(name: str, objects: list[tuple[str, int, int]]) -> str:
    """Write (key, size in bytes, seed) each, in one transfer."""
    pieces = [(np.frombuffer(bytearray(body_of(size, seed)), np.uint8), key, 0) for key, size, seed in objects]
    return transfer(name, "WRITE", pieces)


def read(name: str, ranges: list[tuple[str, int, int]]) -> dict[str, Any]:
    """Read (key, offset, length) each, in one transfer: the state and a digest of what came."""
    pieces = [(np.zeros(length, np.uint8), key, offset) for key, offset, length in ranges]
    state = transfer(name, "READ", pieces)
    return {"state": state, "digests": [digest_of(piece.tobytes()) for piece, _key, _offset in pieces]}


def query(name: str, keys: list[str]) -> list[bool]:
    """Which keys are there, as the tiers look them up: one HEAD each."""
    found = agents[name].query_memory([(0, 1, 0, key) for key in keys], "OBJ", "OBJ")
    return [entry is not None for entry in found]


if __name__ == "__main__":
    serve({"open": open_agent, "write": write, "read": read, "query": query})
