"""Which codec a chunk gets in a tier: what its namespace declares (`codecs`), as far as this machine and this chunk allow it.

Tensor codecs are for chunks of one blob whose plain bytes are the tensor that the layout describes, with the chunk's own number of
tokens; for all else, and where a codec is missing here, the answer is that the chunk stays as it is. Each reason is told once.

Lossy codecs are for the home tier alone, where the namespace is `lossy` and the chunk's class is `memory`: nobody was promised that
its bytes last. Class `local` promises just that, so its home copy is lossless, in the best codec there is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final

import msgspec

from kvobj.catalog.namespace_protocol import NamespaceRow, Namespaces
from kvobj.catalog.rows import ObjectRow
from kvobj.codec.frame import CODEC_RAW, CODEC_ZP, MAX_PLAIN_BYTES
from kvobj.errors import InvalidRequestError
from kvobj.store.places import DEFAULT_NAMESPACE
from kvobj.tensors.form import TensorForm
from kvobj.tensors.profiles import POSITIONS, Profile
from kvobj.tiers.coded_frames import Coding, is_lossy, needs_profile, unusable

_INSTEAD_OF_LOSSY: Final = ("xa", "x3", CODEC_ZP)
"""What a chunk of class `local` gets where its namespace says something lossy; the first that works."""
_CACHES: Final = ("hbm", "dram")
_NOTES_MAX: Final = 64
_FINGERPRINT_BYTES: Final = 16
_HALF_FLOATS: Final = ("bf16", "fp16")


async def _no_profile(_: bytes) -> Profile | None:
    return None


class CodingRules:
    """See the module's text. Event-loop-only; an answer about a namespace without codecs takes 0.3 µs."""

    def __init__(
        self,
        namespaces: Namespaces,
        *,
        log: logging.Logger,
        profile_of: Callable[[bytes], Awaitable[Profile | None]] = _no_profile,
    ) -> None:
        self._namespaces = namespaces
        self.profile_of = profile_of
        """The profile of a digest, None where there is none."""
        self._log = log
        self._told: dict[tuple[str, str], str] = {}

    async def of_row(self, row: ObjectRow, tier: str) -> Coding | None:
        """How the chunk is to lie in the tier; None: as it was put. Lossy where the namespace says so, whatever the class."""
        if row.namespace in ("", DEFAULT_NAMESPACE) or len(row.blobs) != 1 or row.blobs[0].codec != CODEC_RAW:
            return None
        namespace = await self._namespaces.namespace(row.bucket, row.namespace)
        if namespace is None:
            return None
        coding = self.of_chunk(namespace, tier, tokens=row.tokens, plain_bytes=row.size_bytes)
        if coding is None or not needs_profile(coding.codec):
            return coding
        profile = await self.profile_of(namespace.profile)
        if profile is None:
            self._tell(coding.codec, tier, "its profile is gone, or is none")
            return None
        position = row.chain_tokens - row.tokens
        return replace(coding, profile=profile, first_position=position if 0 <= position < POSITIONS else 0)

    def of_chunk(
        self, namespace: NamespaceRow, tier: str, *, tokens: int, plain_bytes: int, may_be_lossy: bool = True
    ) -> Coding | None:
        """How a chunk of the namespace is to lie in the tier; None: as it was put."""
        codec = namespace.codecs.get(tier, CODEC_RAW)
        if codec == CODEC_RAW or not 0 < plain_bytes <= MAX_PLAIN_BYTES:
            return None
        choices: tuple[str, ...] = (codec,)
        if is_lossy(codec):
            if tier in _CACHES:
                self._tell(codec, tier, "memory holds what was put: a lossy copy is made below it")
            if tier in _CACHES or not namespace.lossy:
                return None
            choices = (codec,) if may_be_lossy else _INSTEAD_OF_LOSSY
        for choice in choices:
            coding = self._usable(namespace, tier, choice, tokens, plain_bytes)
            if coding is not None:
                return coding
        return None

    def notes(self) -> tuple[str, ...]:
        """For status: which declared codecs are not used, and why."""
        return tuple(f"codec {codec} is not used in {tier}: {reason}" for (codec, tier), reason in self._told.items())

    def _usable(self, namespace: NamespaceRow, tier: str, codec: str, tokens: int, plain_bytes: int) -> Coding | None:
        layout = _layout(namespace.declaration)
        fingerprint = namespace.fingerprint[:_FINGERPRINT_BYTES].ljust(_FINGERPRINT_BYTES, b"\0")
        if codec == CODEC_ZP:
            element_bytes = 2 if layout.get("dtype") in _HALF_FLOATS else 1
            return Coding(codec, None, fingerprint, element_bytes)
        form = form_of(namespace.declaration, tokens)
        if form is None or form.plain_bytes != plain_bytes:
            return None
        coding = Coding(codec, form, fingerprint)
        reason = unusable(coding)
        if reason is not None:
            self._tell(codec, tier, reason)
            return None
        return coding

    def _tell(self, codec: str, tier: str, reason: str) -> None:
        if (codec, tier) not in self._told and len(self._told) < _NOTES_MAX:
            self._told[codec, tier] = reason
            self._log.warning("codec %s is not used in %s: %s", codec, tier, reason)


@lru_cache(maxsize=1024)
def _layout(declaration: bytes) -> Mapping[str, object]:
    document: dict[str, object] = msgspec.json.decode(declaration, type=dict[str, object])
    layout = document.get("layout")
    return layout if isinstance(layout, dict) else {"kind": "opaque"}


@lru_cache(maxsize=4096)
def form_of(declaration: bytes, tokens: int) -> TensorForm | None:
    """The tensor that so many tokens of a namespace are; None where it declares none, or one that no codec takes."""
    try:
        return TensorForm.from_layout(_layout(declaration), tokens)
    except InvalidRequestError:
        return None  # a layout with sizes that no tensor codec takes
