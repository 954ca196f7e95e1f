"""All fuzz targets by their names, and the cases that are kept for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from fuzz_documents import DocumentTarget
from fuzz_engine import Target
from fuzz_fields import FieldTarget
from fuzz_framing import AwsChunkedTarget, HttpChunkedTarget
from fuzz_heads import HeadTarget
from fuzz_message import CORPUS
from fuzz_repeated import RepeatedTarget
from fuzz_service import ServiceTarget
from fuzz_settings import SettingsTarget
from fuzz_signatures import CanonicalTarget, SignatureTarget

TARGETS: Final[dict[str, Callable[[], Target]]] = {
    "aws-chunked": AwsChunkedTarget,
    "http-chunked": HttpChunkedTarget,
    "heads": HeadTarget,
    "signatures": SignatureTarget,
    "canonical": CanonicalTarget,
    "fields": FieldTarget,
    "documents": DocumentTarget,
    "settings": SettingsTarget,
    "service": ServiceTarget,
    "repeated": RepeatedTarget,
}
HANDLERS: Final = frozenset(ServiceTarget.modules)
"""What the service target reaches beside the parsers."""
REGRESSIONS: Final[Path] = CORPUS / "regressions"
"""Cases that were findings once, in a folder by the target's name."""
GROWN: Final[Path] = CORPUS / "grown"
"""Cases that reached what none before them did, likewise."""


def known_cases(target: Target) -> list[bytes]:
    """What is run first: the target's own seeds, what was a finding once, what was kept for what it reaches."""
    kept = [path.read_bytes() for folder in (REGRESSIONS, GROWN) for path in sorted((folder / target.name).glob("*"))]
    return [*target.seeds(), *kept]
