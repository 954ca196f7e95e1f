"""`python -m kvobj.admin` is `kvobj-admin`."""

from __future__ import annotations

import sys

from kvobj.admin import main

if __name__ == "__main__":
    sys.exit(main())
