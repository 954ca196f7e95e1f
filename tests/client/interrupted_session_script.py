"""A program that is interrupted at every place of a session's life: argument 1 is the endpoint, 2 and 3 the keys. Run by
`test_session_lifecycle.py`: an interrupt in the middle of `Thread.start` leaves a thread that never begins, in this process.

Prints at how many places it was interrupted, and goes on to live, with its client open, until its input ends.
"""

from __future__ import annotations

import gc
import sys

from test_interrupts import interrupted_everywhere

from kvobj.client import Credentials, KvClient, Session


def main() -> None:
    """Interrupted everywhere; no session is anybody's then."""
    with KvClient(sys.argv[1], Credentials(sys.argv[2], sys.argv[3]), "cache", same_host=False) as client:
        client.put_chunk("a", b"a")

        def call() -> None:
            with Session(client, ttl_ms=1000) as session:
                session.match(ids=["a"])

        places = sum(1 for _ in interrupted_everywhere(call))
        gc.collect()
        sys.stdout.write(f"{places}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
