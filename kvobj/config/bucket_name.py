"""Which names a bucket may have: the S3 rules for general purpose buckets.

Source: Amazon S3 User Guide, "General purpose bucket naming rules".
"""

from __future__ import annotations

import re
from typing import Final

_SHAPE: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_ADDRESS: Final = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+", re.ASCII)
_RESERVED_PREFIXES: Final = ("xn--", "sthree-", "amzn-s3-demo-")
_RESERVED_SUFFIXES: Final = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")


def bucket_name_problem(name: str) -> str | None:
    """What is wrong with `name` as a bucket name, or None."""
    if _SHAPE.fullmatch(name) is None:
        return "must be 3 to 63 of a-z, 0-9, dot and hyphen, with a letter or digit at both ends"
    if ".." in name:
        return "must not have two dots in a row"
    if ".-" in name or "-." in name:
        return "must not have a dot beside a hyphen: each label is a host's name"
    if _ADDRESS.fullmatch(name):
        return "must not look like an IP address"
    if name.startswith(_RESERVED_PREFIXES) or name.endswith(_RESERVED_SUFFIXES):
        return "has a beginning or an end that S3 reserves"
    return None
