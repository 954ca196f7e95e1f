"""The interpreter's search for cyclic garbage, in a process that serves.

It stops every thread for as long as it takes, which grows with the objects that are alive. Those that stay for as long as a chunk
does are not followed at all (`arena.extent.Hold`); what is left are the requests on their way, of which a batch of a thousand
chunks brings thirty thousand objects. Hardly any of them ends in a cycle.
"""

from __future__ import annotations

import gc
from typing import Final

# How many more objects there may be than at the last look before it is looked again; the interpreter's own 700 led to a look
# through all of them (0.07 s) every half second while batches of small chunks were stored. A cycle is a few KB.
_NEW_OBJECTS: Final = 20_000
_LOOKS: Final = 10


def search_from_now_on() -> None:
    """The start is over: what it made stays as long as the process and is never looked at again; the rest is, now and then."""
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _LOOKS, _LOOKS)
    gc.enable()
