"""What a remote S3 server can do, as found out by asking it: never assumed from a name or a version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UploadCheck = Literal["crc32c", "md5", "sha256", "none"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`server`: what it calls itself. `upload_check`: how a body is checked on its way up (`writing.py`). `if_absent`, `if_match`:
    whether a PUT under a condition is refused where it does not hold, `delete_if_match` the same of DELETE. `delete_many`:
    DeleteObjects removes. `quotes_etags`: whether conditions name an ETag in its quotes (radosgw 16 knows a PUT's without them
    only). `ranges`: a ranged GET gives the range. `min_part_bytes`: the least that a part but the last must have."""

    server: str
    upload_check: UploadCheck
    if_absent: bool
    if_match: bool
    delete_if_match: bool
    delete_many: bool
    ranges: bool
    min_part_bytes: int
    quotes_etags: bool = True
