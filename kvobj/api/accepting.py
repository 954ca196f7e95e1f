"""Which codecs a reader takes as they are: parsed from `x-kvobj-accept` and from `?mget`, and what a reply says it carries. Pure.

Source: `kv-api` §4. Items are separated by commas: a codec, and perhaps `;max-error=NUMBER`, as in `x3, raw, eq4;max-error=0.07`.
Codecs that this server does not know are left out: it holds nothing in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from kvobj.api.chunk_headers import ACCEPT_HEADER
from kvobj.api.errors import S3Error
from kvobj.api.header_text import Header
from kvobj.catalog.rows import ObjectRow
from kvobj.codec.frame import CODEC_RAW
from kvobj.store.representation import Accepted, lossy_text, stored_codec
from kvobj.tiers.coded_frames import own_name, spoken_name

CODEC_HEADER: Final = "x-kvobj-codec"
LOSSY_HEADER: Final = "x-kvobj-lossy"
LOSSY_DIGEST_HEADER: Final = "x-kvobj-lossy-digest"
PROFILE_HEADER: Final = "x-kvobj-profile"
"""Hash of the profile without which the frame cannot be decoded."""
VARY: Final = ("vary", ACCEPT_HEADER)
"""Of every reply that depends on what its reader takes (RFC 9110 §12.5.5)."""
ITEMS_MAX: Final = 64
_ITEM: Final = re.compile(
    r"[ \t]*([a-z0-9:/]{1,32})[ \t]*(?:;[ \t]*max-error=([0-9]{1,9}(?:\.[0-9]{1,12})?(?:e[+-]?[0-9]{1,2})?)[ \t]*)?\Z",
    re.ASCII | re.IGNORECASE,
).match


def parse_accepted(items: Iterable[str]) -> tuple[Accepted, ...] | None:
    """What these items take; None where that is no more than plain bytes, which every reader is given. ValueError for an item
    that is none, or too many of them."""
    accepted: list[Accepted] = []
    for number, item in enumerate(items):
        found = _ITEM(item)
        if found is None or number >= ITEMS_MAX:
            raise ValueError("not a list of codecs: each is a name, and perhaps ;max-error= with a number")
        try:
            codec = own_name(found[1].lower())
        except ValueError:
            continue
        accepted.append(Accepted(codec, None if found[2] is None else float(found[2])))
    return None if accepted == [Accepted(CODEC_RAW)] else tuple(accepted)


def parse_accept(fields: Mapping[str, str]) -> tuple[Accepted, ...] | None:
    """What the header takes; None where it is absent or says `raw`. Raises `S3Error` InvalidArgument."""
    value = fields.get(ACCEPT_HEADER)
    if value is None:
        return None
    try:
        return parse_accepted(value.split(","))
    except ValueError as error:
        raise S3Error("InvalidArgument", f"{ACCEPT_HEADER} is {error}.", ArgumentName=ACCEPT_HEADER) from error


def representation_headers(row: ObjectRow) -> list[Header]:
    """What a reply says of the bytes that it carries, to a reader that said which codecs it takes."""
    stored = stored_codec(row.blobs[0]) if row.blobs else None
    headers: list[Header] = [VARY, (CODEC_HEADER, CODEC_RAW if stored is None else spoken_name(stored))]
    lossy = lossy_text(row)
    if lossy is not None and row.lossy is not None:
        headers += [(LOSSY_HEADER, lossy), (LOSSY_DIGEST_HEADER, row.lossy.digest.hex())]
        if row.lossy.profile:
            headers.append((PROFILE_HEADER, row.lossy.profile.hex()))
    return headers
