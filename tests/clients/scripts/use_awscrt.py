"""awscrt's own S3 client, as LMCache uses it: parts and pinned ranges made by the client, with and without checksums."""

from __future__ import annotations

import io
import tempfile
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import quote

from awscrt import auth, http, s3  # type: ignore[import-untyped]
from awscrt import io as crt_io
from given import MIB, NAMES, body_of, given, refused, report, same

PART_BYTES = 5 * MIB

place = given()
bootstrap = crt_io.ClientBootstrap(crt_io.EventLoopGroup(2), crt_io.DefaultHostResolver(crt_io.EventLoopGroup(1)))
provider = auth.AwsCredentialsProvider.new_static(place.access_key, place.secret_key)
client = s3.S3Client(
    bootstrap=bootstrap,
    region=place.region,
    signing_config=s3.create_default_s3_signing_config(region=place.region, credential_provider=provider),
    tls_mode=s3.S3RequestTlsMode.DISABLED,
    part_size=PART_BYTES,
    multipart_upload_threshold=PART_BYTES,
    throughput_target_gbps=1.0,
)
host = f"{place.bucket}.{place.host}" if place.is_virtual_hosted else place.host


class Answer:
    """What came back of one request of the client's, which may have been many on the wire."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.start: int | None = None
        self.headers: dict[str, str] = {}
        self.status = 0
        self.was_validated = False

    def on_headers(self, status_code: int, headers: list[tuple[str, str]], **_more: object) -> None:
        self.status = status_code
        self.headers = {name.lower(): value for name, value in headers}

    def on_body(self, chunk: bytes, offset: int, **_more: object) -> None:
        self.start = offset if self.start is None else self.start
        assert offset == self.start + len(self.body), "the client delivers in order"
        self.body += chunk

    def on_done(self, did_validate_checksum: bool = False, **_more: object) -> None:  # noqa: FBT001, FBT002
        self.was_validated = did_validate_checksum


def ask(
    method: str, name: str, body: bytes | None = None, *, headers: dict[str, str] | None = None, **more: object
) -> Answer:
    path = f"/{quote(place.key(name), safe='/~')}"
    fields = http.HttpHeaders([("host", host), *(headers or {}).items()])
    if body is not None:
        fields.add("content-length", str(len(body)))
        fields.add("content-type", "application/octet-stream")
    request = http.HttpRequest(
        method,
        path if place.is_virtual_hosted else f"/{place.bucket}{path}",
        fields,
        None if body is None else io.BytesIO(body),
    )
    kinds = {"PUT": s3.S3RequestType.PUT_OBJECT, "GET": s3.S3RequestType.GET_OBJECT}
    answer = Answer()
    made = client.make_request(
        type=kinds.get(method, s3.S3RequestType.DEFAULT),
        operation_name=None if method in kinds else {"DELETE": "DeleteObject", "HEAD": "HeadObject"}[method],
        request=request,
        on_headers=answer.on_headers,
        on_body=answer.on_body,
        on_done=answer.on_done,
        **more,
    )
    finished: Future[None] = made.finished_future
    try:
        finished.result(60)
    except s3.S3ResponseError as error:
        error.add_note(f"{method} {name}: {error.status_code} {error.body!r}")
        raise
    return answer


bodies = {"empty": b"", "tiny": b"x", "one part": body_of(PART_BYTES - 1), "parts@7B": body_of(3 * PART_BYTES + 77, 7)}
bodies |= {name: name.encode() for name in NAMES}
for name, body in bodies.items():
    ask("PUT", name, body)
    found = ask("GET", name)
    same(bytes(found.body), body)
    head = ask("HEAD", name)
    assert (head.status, head.headers["content-length"]) == (200, str(len(body)))

body = bodies["parts@7B"]
piece = ask("GET", "parts@7B", headers={"range": f"bytes={PART_BYTES - 5}-{2 * PART_BYTES + 5}"})
assert piece.status == 206
same(bytes(piece.body), body[PART_BYTES - 5 : 2 * PART_BYTES + 6])
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "file")
    path.write_bytes(body)
    ask("PUT", "from a file", headers={"content-length": str(len(body))}, send_filepath=str(path))
    path.unlink()
    ask("GET", "from a file", recv_filepath=str(path))
    same(path.read_bytes(), body)

for algorithm in s3.S3ChecksumAlgorithm:
    for where in s3.S3ChecksumLocation:
        sent = s3.S3ChecksumConfig(algorithm=algorithm, location=where, validate_response=False)
        checked = s3.S3ChecksumConfig(validate_response=True)
        for size in (100_000, PART_BYTES + 77):
            name = f"checked {algorithm.name} {where.name} {size}"
            ask("PUT", name, body[:size], checksum_config=sent)
            found = ask("GET", name, checksum_config=checked)
            same(bytes(found.body), body[:size])
            assert found.was_validated or size > PART_BYTES, name

with refused(s3.S3ResponseError) as caught:
    ask("GET", "absent")
assert caught[0].status_code == 404
assert b"NoSuchKey" in (caught[0].body or b"")
assert ask("DELETE", "tiny").status == 204
with refused(s3.S3ResponseError) as caught:
    ask("HEAD", "tiny")
assert caught[0].status_code == 404
report("awscrt")
