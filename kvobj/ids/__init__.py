"""Names: blob ids, epochs and request ids that are never reused; chunk ids, which follow from the tokens; chain sums.

The first kind is here for everybody; `chunk_ids`, `chain_sums` and `engine_chains` are imported by their own names.
"""

from __future__ import annotations

from kvobj.ids.blob_ids import (
    BLOB_ID_BYTES,
    DIGEST_BYTES,
    BlobId,
    BlobIdAllocator,
    RandomBytes,
    epoch_of,
    make_blob_id,
    new_epoch,
    new_request_id,
    new_upload_id,
    sequence_of,
)

__all__ = [
    "BLOB_ID_BYTES",
    "DIGEST_BYTES",
    "BlobId",
    "BlobIdAllocator",
    "RandomBytes",
    "epoch_of",
    "make_blob_id",
    "new_epoch",
    "new_request_id",
    "new_upload_id",
    "sequence_of",
]
