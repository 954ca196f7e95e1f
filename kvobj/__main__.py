"""`python -m kvobj` is `kvobj`."""

from __future__ import annotations

import sys

from kvobj.cli import main

if __name__ == "__main__":
    sys.exit(main())
