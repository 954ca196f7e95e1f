"""`kvobj-admin`: looks into a running server through its admin port, or into a stopped store's data directory."""

from __future__ import annotations

import sys

from kvobj.extras import server_missing


def main() -> int:
    """`kvobj-admin` as it is installed. Exits as `admin.cli.main`, and with 2 and one line where only the client is installed."""
    try:
        from kvobj.admin import cli  # noqa: PLC0415 - imports what the extra `server` brings
    except ModuleNotFoundError as error:
        sys.stderr.write(f"kvobj-admin: {server_missing(error)}\n")
        return 2
    return cli.main()
