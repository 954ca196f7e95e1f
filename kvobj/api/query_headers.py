"""Headers that a presigned URL carries in its query: SDKs put x-amz-* headers there, so that who uses the URL need not know them.

S3 takes each as the header of that name. They are signed, as the whole query is; which is why only presigned requests have them.
Source: Amazon S3 API reference, "Authenticating Requests: Using Query Parameters".
"""

from __future__ import annotations

import re
from typing import Final

from kvobj.api.credential import OWN_PARAMETERS
from kvobj.api.errors import S3Error
from kvobj.api.header_text import is_plain
from kvobj.api.request import Target

_CHECKSUM_NAMES: Final = frozenset({"x-amz-checksum-algorithm", "x-amz-checksum-mode", "x-amz-checksum-type"})
_NAME: Final = re.compile(r"x-amz-[a-z0-9!#$%&'*+.^_`|~\-]{1,120}\Z").match


def with_query_headers(fields: dict[str, str], target: Target) -> dict[str, str]:
    """The headers of a presigned request whose signature was verified, those in its query among them.

    Raises `S3Error` InvalidArgument for what no header could hold, and where a header came twice and not the same.
    """
    found: dict[str, str] = {}
    for raw_name, raw_value in target.query:
        name = raw_name.lower()
        if not name.startswith("x-amz-") or name in OWN_PARAMETERS or _is_of_another_body(name):
            continue
        if not _NAME(name) or not is_plain(raw_value):
            raise S3Error("InvalidArgument", "A query parameter is no header.", ArgumentName=raw_name)
        value = raw_value.encode().decode("latin-1").strip(" \t")  # as headers arrive: bytes read as latin-1
        if found.setdefault(name, fields.get(name, value)) != value:
            raise S3Error("InvalidArgument", "A header was sent twice, with different values.", ArgumentName=raw_name)
    return {**fields, **found} if found else fields


def _is_of_another_body(name: str) -> bool:
    """A checksum's value. SDKs put that of the empty body into a URL made before there is a body; S3 ignores it there."""
    return name == "x-amz-sdk-checksum-algorithm" or (
        name.startswith("x-amz-checksum-") and name not in _CHECKSUM_NAMES
    )
