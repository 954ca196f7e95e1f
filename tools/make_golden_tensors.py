"""Adds the golden vectors of tensor codecs that are missing in `tests/golden/tensor_frames`; never replaces one.

A vector is the BLAKE3 of a case's plain bytes (`tests/tensor_cases.py`), of its frame and of what that decodes to. A file holds
those of one codec at one revision. With `--check` nothing is written. Exits 1 where a vector is no longer what is written there:
then the format has changed, which takes a new revision of the codec, or something is broken.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Final, TypedDict

from command_line import Parser, codec_name, run_tool

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from blake3 import blake3  # noqa: E402 - behind the path that tests and package are found by
from tensor_cases import CASES, profile_of  # noqa: E402

from kvobj.tensors.codec_names import CodecName  # noqa: E402
from kvobj.tensors.codecs import (  # noqa: E402
    decode_frame,
    encode_bound,
    encode_frame,
    parse_tensor_frame,
    refusal,
    unavailable,
)

DIRECTORY: Final = ROOT / "tests" / "golden" / "tensor_frames"
CODECS: Final = ("x3", "xa", "f8", "h4", "eq57", "eq55", "eq4", "eq3", "eq:83/2", "ek")
"""Codecs whose vectors are kept; those of `ek` are made with `tensor_cases.profile_of`."""
FINGERPRINT: Final = bytes(range(16))
FIRST_POSITION: Final = 512


class Vector(TypedDict):
    """One case under one codec: digests in hex, and the frame's length."""

    plain: str
    frame: str
    frame_bytes: int
    decoded: str


def path_of(codec: str) -> Path:
    """The file of a codec's vectors, at its present revision."""
    name = CodecName.parse(codec)
    return DIRECTORY / f"{str(name).replace(':', '-').replace('/', '-')}.r{name.kind.revision}.json"


@cache
def plain_of(case_name: str) -> bytes:
    """A case's plain bytes."""
    case = CASES[case_name]
    return case.make(case.form)


def vector(codec: str, case_name: str) -> Vector:
    """What this version makes of a case."""
    case = CASES[case_name]
    plain = plain_of(case_name)
    profile = profile_of(case.form) if CodecName.parse(codec).kind.needs_profile else None
    room = memoryview(bytearray(encode_bound(codec, case.form)))
    size_bytes = encode_frame(
        memoryview(plain),
        room,
        codec=codec,
        form=case.form,
        fingerprint=FINGERPRINT,
        first_position=FIRST_POSITION,
        profile=profile,
    )
    frame, decoded = room[:size_bytes], bytearray(len(plain))
    decode_frame(frame, parse_tensor_frame(frame, size_bytes), memoryview(decoded), profile=profile)
    return {
        "plain": blake3(plain).hexdigest(),
        "frame": blake3(frame).hexdigest(),
        "frame_bytes": size_bytes,
        "decoded": blake3(decoded).hexdigest(),
    }


def update(codec: str, *, check: bool) -> list[str]:
    """Add a codec's missing vectors; returns what is wrong."""
    missing = unavailable(codec)
    if missing is not None:
        return [f"{codec}: {missing}"]
    path = path_of(codec)
    held: dict[str, Vector] = json.loads(path.read_text()) if path.exists() else {}
    problems: list[str] = []
    for name, case in CASES.items():
        if refusal(codec, case.form) is not None:
            continue
        made = vector(codec, name)
        if name in held and held[name] != made:
            problems.append(f"{codec} {name}: {held[name]} was, {made} is")
        elif name not in held and check:
            problems.append(f"{codec} {name}: has no vector")
        held.setdefault(name, made)
    if not check and not problems:
        path.write_text(json.dumps(held, indent=1) + "\n")
    return problems


def main() -> int:
    """Add or check all."""
    parser = Parser(__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("codecs", nargs="*", type=codec_name, default=CODECS, help="default: all")
    arguments = parser.parse_args()
    problems = [problem for codec in arguments.codecs for problem in update(codec, check=arguments.check)]
    print("\n".join(problems) or f"{len(arguments.codecs)} codecs: every vector is as it was", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    run_tool(main)
