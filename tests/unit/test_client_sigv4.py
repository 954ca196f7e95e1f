"""The client's signer, against another implementation of the same rules."""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as OtherCredentials
from hypothesis import given
from hypothesis import strategies as st

from kvobj.client.credentials import Credentials
from kvobj.client.sigv4 import encoded_path, encoded_query, signed_headers

TIMESTAMP = "20260102T030405Z"
CREDENTIALS = Credentials("an-access-key", "a-secret-key")
_keys = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=20)


class _TheirSignature(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """Their signature at our time: `add_auth` asks the clock, the steps inside do not."""

    def sign(self, request: AWSRequest) -> str:
        request.context["timestamp"] = TIMESTAMP
        canonical = self.canonical_request(request)
        return str(self.signature(self.string_to_sign(request, canonical), request))


@given(
    _keys,
    st.lists(st.tuples(_keys, st.text(max_size=10)), max_size=3, unique_by=lambda pair: pair[0]),
    st.binary(max_size=20),
)
def test_signatures_agree_with_another_implementation(key: str, query: list[tuple[str, str]], body: bytes) -> None:
    path = f"/bucket/{key}"
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": "127.0.0.1:9000", "x-amz-meta-text": "some text"}
    ours = signed_headers(
        CREDENTIALS,
        method="PUT",
        path=path,
        query=query,
        headers=headers,
        payload_sha256=digest,
        region="us-east-1",
        timestamp=TIMESTAMP,
    )
    url = f"http://127.0.0.1:9000{encoded_path(path)}" + (f"?{encoded_query(query)}" if query else "")
    theirs = AWSRequest(
        method="PUT", url=url, data=body, headers={**headers, "X-Amz-Content-SHA256": digest, "X-Amz-Date": TIMESTAMP}
    )
    signer = _TheirSignature(OtherCredentials(CREDENTIALS.access_key, CREDENTIALS.secret_key), "s3", "us-east-1")
    assert ours["authorization"].endswith(f"Signature={signer.sign(theirs)}")


def test_the_path_is_encoded_once_and_never_normalised() -> None:
    assert encoded_path("/bucket/a//b/../c d+e~é") == "/bucket/a//b/../c%20d%2Be~%C3%A9"
    assert urlsplit(encoded_path("/bucket/x?y")).query == ""


def test_the_secret_is_not_printed() -> None:
    assert CREDENTIALS.secret_key not in repr(CREDENTIALS)
