"""The client's signing keys are kept for a day, and are those of the day, the region and the secret that they are used for."""

from __future__ import annotations

import hashlib
import hmac
import re
from itertools import product

from kvobj.client.credentials import Credentials
from kvobj.client.sigv4 import EMPTY_SHA256, signed_headers

HOST = "127.0.0.1:9000"


def expected(secret_key: str, day: str, region: str) -> str:
    """Written out from the rules, without anything kept."""
    timestamp = f"{day}T030405Z"
    names = "host;x-amz-content-sha256;x-amz-date"
    request = f"GET\n/a\n\nhost:{HOST}\nx-amz-content-sha256:{EMPTY_SHA256}\nx-amz-date:{timestamp}\n\n{names}\n{EMPTY_SHA256}"
    scope = f"{day}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{timestamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{secret_key}".encode()
    for step in (*scope.split("/"), text):
        key = hmac.new(key, step.encode(), "sha256").digest()
    return key.hex()


def test_a_kept_signing_key_is_never_that_of_another_day_region_or_secret() -> None:
    cases = list(product(["one", "two"], ["20260101", "20260102"], ["us-east-1", "eu-west-1"]))
    for secret_key, day, region in [*cases, *reversed(cases)]:
        signed = signed_headers(
            Credentials("key", secret_key),
            method="GET",
            path="/a",
            query=(),
            headers={"host": HOST},
            payload_sha256=EMPTY_SHA256,
            region=region,
            timestamp=f"{day}T030405Z",
        )
        signature = re.search(r"Signature=([0-9a-f]{64})$", signed["authorization"])
        assert signature is not None
        assert signature[1] == expected(secret_key, day, region)
