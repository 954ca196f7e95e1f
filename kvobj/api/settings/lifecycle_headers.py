"""Headers that tell when a bucket's lifecycle rules end an object or an upload. In real days, whatever `[debug]` says.

Source: S3 API reference, PutObject (x-amz-expiration) and CreateMultipartUpload (x-amz-abort-date, x-amz-abort-rule-id).
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from kvobj.api.conditions import http_date
from kvobj.api.header_text import Header
from kvobj.catalog.rows import BucketRow, ObjectRow, UploadRow
from kvobj.gc.lifecycle_rules import first_expiration, first_upload_end

# S3 sends an id as it is; encoded is only what would end the quoted text, or cannot stand in a header at all.
_AS_THEY_ARE: Final = " !#$&'()*+,-./:;<=>?@[]^_`{|}~"


def expiration_headers(bucket: BucketRow, row: ObjectRow) -> list[Header]:
    """When the object expires and by which rule; nothing where none applies."""
    found = first_expiration(bucket.lifecycle, row)
    if found is None:
        return []
    at_ms, rule = found
    return [("x-amz-expiration", f'expiry-date="{http_date(at_ms)}", rule-id="{_id_text(rule.id)}"')]


def abort_headers(bucket: BucketRow, upload: UploadRow) -> list[Header]:
    """When the upload is ended, should it still be in progress, and by which rule."""
    found = first_upload_end(bucket.lifecycle, upload)
    if found is None:
        return []
    at_ms, rule = found
    return [("x-amz-abort-date", http_date(at_ms)), ("x-amz-abort-rule-id", _id_text(rule.id))]


def _id_text(rule_id: str) -> str:
    return quote(rule_id, safe=_AS_THEY_ARE)
