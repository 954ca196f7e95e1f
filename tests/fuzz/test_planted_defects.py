"""Whether the fuzz would notice: defects of the kinds that other servers had, planted in the parsers, each found by its target."""

import dataclasses
import hmac
import re
from collections.abc import Callable

import pytest
from fuzz_engine import run_cases
from fuzz_targets import TARGETS

from kvobj.api import aws_chunked, hot_kinds, hot_reads, multipart, object_headers, ranges, request, sigv4, xml
from kvobj.api.access import policy_document
from kvobj.api.http import chunked_framing, plain_head, request_body, request_head
from kvobj.wire.joined_chunks import JoinedChunks, native_joiner

MOST_CASES = 4000


def merge_slashes(patch: pytest.MonkeyPatch) -> None:
    parse = request.parse_target
    patch.setattr(
        "fuzz_signatures.parse_target", lambda target, host, rules: parse(re.sub("//+", "/", target), host, rules)
    )


def take_plus_for_space(patch: pytest.MonkeyPatch) -> None:
    decode = request.decode
    patch.setattr(request, "decode", lambda raw: decode(raw.replace("+", " ")))


def read_one_byte_more(patch: pytest.MonkeyPatch) -> None:
    def parse_more(value: str, size: int) -> tuple[int, int] | None:
        found = ranges.parse_range(value, size)
        return None if found is None else (found[0], found[1] + 1)

    patch.setattr("fuzz_fields.parse_range", parse_more)


def forget_the_length(patch: pytest.MonkeyPatch) -> None:
    check = request_head.HeadReader._check
    patch.setattr(
        request_head.HeadReader, "_check", lambda self, head: dataclasses.replace(check(self, head), length=0)
    )


def lose_a_byte_of_joined_chunks(patch: pytest.MonkeyPatch) -> None:
    join = native_joiner()
    if join is None:
        pytest.skip("no native library")

    def join_wrongly(window: memoryview, before: JoinedChunks, limit: int, minimum: int) -> JoinedChunks:
        joined = join(window, before, limit, minimum)
        if joined.chunk_left and joined.chunks:
            joined.chunk_left -= 1
        return joined

    patch.setattr(request_body, "native_joiner", lambda: join_wrongly)


def overlook_that_the_calls_id_is_signed(patch: pytest.MonkeyPatch) -> None:
    text_of = hot_kinds.Signed.text_of

    def text_wrongly(signed: hot_kinds.Signed, request: bytes, at: int, stamp: str) -> str:
        return text_of(dataclasses.replace(signed, call_id=None), request, at, stamp)

    patch.setattr(hot_kinds.Signed, "text_of", text_wrongly)


def always(module: object, name: str, answer: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, name, lambda *_, **__: answer)


@pytest.mark.parametrize(
    ("target", "plant"),
    [
        ("aws-chunked", lambda patch: patch.setattr(aws_chunked, "_require_signature", lambda _key, _text, given: given)),
        ("http-chunked", lambda patch: patch.setattr(chunked_framing, "_SIZE_LINE", re.compile(rb"[0-9a-f]{1,16};?\s*\n"))),
        ("http-chunked", lose_a_byte_of_joined_chunks),
        ("heads", forget_the_length),
        ("heads", always(plain_head, "_is_plainly_chunked", True)),  # noqa: FBT003 - what it answers
        ("signatures", always(hmac, "compare_digest", True)),  # noqa: FBT003 - what it answers
        ("signatures", always(sigv4, "_check_signed_headers", None)),
        ("signatures", merge_slashes),
        ("canonical", take_plus_for_space),
        ("fields", read_one_byte_more),
        ("fields", always(object_headers, "is_plain", True)),  # noqa: FBT003 - what it answers
        ("documents", always(xml._Reader, "_refuse", 1)),
        ("settings", always(policy_document.Principals, "hold", True)),  # noqa: FBT003 - what it answers
        ("repeated", always(hot_kinds.Kind, "is_of", True)),  # noqa: FBT003 - what it answers
        ("repeated", always(sigv4.SignatureVerifier, "holds", True)),  # noqa: FBT003 - what it answers
        ("repeated", always(hot_reads, "is_owners_alone", True)),  # noqa: FBT003 - what it answers
        ("repeated", lambda patch: patch.setattr(hot_kinds, "_CALL_ID", re.compile(rb"(?s).{36}").match)),
        ("repeated", overlook_that_the_calls_id_is_signed),
        ("service", lambda patch: patch.setattr(multipart, "checked_type", lambda _algorithm, kind: kind)),
    ],
)  # fmt: skip
def test_a_planted_defect_is_found(
    target: str, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzzed = TARGETS[target]()
    plant(monkeypatch)
    statistics = run_cases(fuzzed, seed=1, numbers=range(MOST_CASES), most_findings=1)
    assert statistics.findings, f"{statistics.cases} cases did not find it"
