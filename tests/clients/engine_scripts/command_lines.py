"""How the script of an engine's client is told what to do: one command a line in, one answer a line out, both JSON.

A script runs in the environment of its engine, with nothing of kvobj or its tests beside this folder, and stays one process, since
what these clients remember between requests (sizes, misses, broken connections) is what has to be seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Command: TypeAlias = Callable[..., Any]
"""Takes the command's fields by name, returns what JSON can say. What it raises is the answer's `error`."""


def body_of(size_bytes: int, seed: int) -> bytes:
    """Random bytes that are the same each time, here and in the test."""
    return random.Random(seed).randbytes(size_bytes)


def digest_of(body: bytes | memoryview) -> str:
    """What stands for a body in an answer."""
    return hashlib.sha256(body).hexdigest()


def serve(commands: Mapping[str, Command]) -> None:
    """Answer until standard input ends. What the client prints goes to standard error, so that answers stay alone."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"value": commands[asked.pop("command")](**asked)}
        except Exception as error:  # noqa: BLE001 - the test decides what is to become of it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
