"""Which bytes a reader gets of a chunk: as they were put, the frame as it lies in a tier, or what a lossy copy decodes to.

A reader names the codecs that it takes (`kv-api` §4). What it gets is told as a row like the chunk's own, but with the one blob
that is to be read and an ETag of its own; a frame is read as it lies where the blob's codec is marked so (`STORED`).
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_CEILING, Context
from typing import Final

import msgspec

from kvobj.catalog.rows import BlobRef, LossyCopy, ObjectRow
from kvobj.codec.frame import CODEC_RAW, raw_frame_bytes
from kvobj.tensors.codec_names import CodecName
from kvobj.tiers.coded_blobs import CodedBlob
from kvobj.tiers.coded_frames import is_coarser, spoken_name
from kvobj.tiers.stored_frames import DemotedCopy

STORED: Final = "stored:"
"""In front of a blob's codec: its bytes are those of the frame, as a tier holds it in that codec."""
_ETAG_END: Final = "-1"
_DIGITS: Final = Context(prec=6, rounding=ROUND_CEILING)


class Accepted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One codec that a reader takes: `raw`, or a codec's own name, whose frames it decodes itself. `max_error`: a lossy copy is
    taken where no value of it is further off; None: of a codec that is lossy any error, of `raw` none."""

    codec: str
    max_error: float | None = None


def stored_codec(blob: BlobRef) -> str | None:
    """The codec in which the blob's frame is to be read as it lies; None where its plain bytes are."""
    return blob.codec[len(STORED) :] if blob.codec.startswith(STORED) else None


def takes_raw(accepts: Sequence[Accepted]) -> bool:
    """Whether plain bytes will do."""
    return any(each.codec == CODEC_RAW for each in accepts)


def plain_only(accepts: Sequence[Accepted]) -> tuple[Accepted, ...]:
    """What is left for who wants a part of the plain bytes."""
    return tuple(each for each in accepts if each.codec == CODEC_RAW)


def choose(row: ObjectRow, lies: Sequence[CodedBlob | None], accepts: Sequence[Accepted]) -> ObjectRow | None:
    """The row to read from: `row` itself for its bytes as they were put, another for anything else; None where nothing will do.

    `lies` tells, fast tier first, how the row's one blob lies in each tier that holds it, None standing for as it was put; it is
    empty where no tier does. Lossless comes before lossy, a frame as it lies before its decoding. Rows of several blobs are only
    plain.
    """
    codecs = {each.codec for each in accepts}
    if len(row.blobs) != 1:
        return row if CODEC_RAW in codecs else None
    (blob,) = row.blobs
    for coded in lies[:1]:
        if coded is not None and coded.codec in codecs:
            return _as_stored(row, blob, coded)
    if lies and CODEC_RAW in codecs:
        return row
    for coded in lies[1:]:
        if coded is not None and coded.codec in codecs:
            return _as_stored(row, blob, coded)
    return None if row.lossy is None else _lossy(row, row.lossy, accepts)


def coarser_wanted(row: ObjectRow, chosen: ObjectRow | None, accepts: Sequence[Accepted]) -> list[str]:
    """Codecs that the reader takes and that the row's lossy copy can be demoted to, the finest first; none where `choose` found
    something better than the copy decoded."""
    copy = row.lossy
    if copy is None or (chosen is not None and (chosen is row or stored_codec(chosen.blobs[0]) is not None)):
        return []
    return sorted(
        {each.codec for each in accepts if is_coarser(each.codec, copy.codec)},
        key=lambda codec: CodecName.parse(codec).rung,
    )


def would_give(row: ObjectRow, lies: Sequence[CodedBlob | None], accepts: Sequence[Accepted]) -> bool:
    """Whether there is something for this reader, as far as that is known without making it: a copy that has to be made coarser
    counts where any error will do, for what the coarser one's is shows only once it is made."""
    if not row.size_bytes:
        return True  # no bytes are the same in every form
    chosen = choose(row, lies, accepts)
    unbounded = [each for each in accepts if each.max_error is None]
    return chosen is not None or bool(coarser_wanted(row, chosen, unbounded))


def choose_demoted(row: ObjectRow, demoted: DemotedCopy, accepts: Sequence[Accepted]) -> ObjectRow | None:
    """The row to read the demoted copy from, as a frame; None where its certificate does not meet what the reader says."""
    if row.lossy is None:
        return None
    copy = msgspec.structs.replace(
        row.lossy,
        codec=demoted.codec,
        frame_bytes=demoted.frame_bytes,
        digest=demoted.digest,
        max_error=demoted.max_error,
    )
    frames = [each for each in accepts if each.codec == demoted.codec]
    return _lossy(msgspec.structs.replace(row, lossy=copy), copy, frames)


def _as_stored(row: ObjectRow, blob: BlobRef, coded: CodedBlob) -> ObjectRow:
    frame = BlobRef(blob.blob_id, coded.frame_bytes, coded.frame_bytes, None, STORED + coded.codec)
    return _row_of(row, frame, _etag(row.etag, coded.codec))


def _lossy(row: ObjectRow, copy: LossyCopy, accepts: Sequence[Accepted]) -> ObjectRow | None:
    etag = f"kv{copy.blob_id.hex()[-24:]}{_ETAG_END}"
    for each in accepts:
        if each.codec == copy.codec and (each.max_error is None or copy.max_error <= each.max_error):
            frame = BlobRef(copy.blob_id, copy.frame_bytes, copy.frame_bytes, None, STORED + copy.codec)
            return _row_of(row, frame, _etag(etag, copy.codec))
    if any(
        each.codec == CODEC_RAW and each.max_error is not None and copy.max_error <= each.max_error for each in accepts
    ):
        decoded = BlobRef(copy.blob_id, copy.plain_bytes, raw_frame_bytes(copy.plain_bytes), copy.digest)
        return _row_of(row, decoded, etag)
    return None


def _row_of(row: ObjectRow, blob: BlobRef, etag: str) -> ObjectRow:
    return msgspec.structs.replace(row, blobs=(blob,), size_bytes=blob.plain_bytes, etag=etag, checksums=(), parts=())


def _etag(etag: str, codec: str) -> str:
    """The ETag of a representation, in the same shape: its only hyphen has a number behind it (`commit.kv_etag`)."""
    return etag.removesuffix(_ETAG_END) + spoken_name(codec).replace("-", "") + _ETAG_END


def lossy_text(row: ObjectRow) -> str | None:
    """What is said of a row whose bytes are, or decode to, those of its lossy copy; None for any other."""
    copy = row.lossy
    if copy is None or not row.blobs or row.blobs[0].blob_id != copy.blob_id:
        return None
    bound = float(_DIGITS.create_decimal_from_float(copy.max_error))  # so that who asks with it gets the copy
    return f"{spoken_name(copy.codec)};max-error={bound:g}"
