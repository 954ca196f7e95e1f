"""Calls that are written as coroutines and, most often, wait for nothing: answered where they are made, or given up."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(call: Coroutine[Any, Any, T]) -> T | None:
    """What a call answers that waits for nothing; None where it has to wait: then it is given up, as if it were cancelled there."""
    try:
        call.send(None)
    except StopIteration as ended:
        value: T = ended.value
        return value
    call.close()
    return None
