"""Real clients over HTTPS, with the server's certificate verified: boto3, aiobotocore, awscrt, the aws CLI, rclone.

Over HTTPS boto3 signs no payload: bodies go as `aws-chunked` with a trailer, inside `Transfer-Encoding: chunked` where their length
is not known, after `Expect: 100-continue`.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import aiobotocore.session
import boto3
import pytest
from aiobotocore.config import AioConfig
from awscrt import auth, http, io, s3  # type: ignore[import-untyped]
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError, SSLError
from certificates import Authority
from client_suite import BUCKETS, PART_BYTES, S3Client, body_of, client_binary
from module_paths import ModulePaths
from server_process import MIB, ServerProcess, ServerSettings

BUCKET = "over-tls"
LARGE = body_of(40 * MIB + 7)


@pytest.fixture(scope="module")
def authority(module_paths: ModulePaths) -> Authority:
    return Authority.make(module_paths.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority, module_paths: ModulePaths) -> Iterator[ServerProcess]:
    directory = module_paths.mktemp("tls-clients")
    certificate, key = directory / "tls.pem", directory / "tls.key"
    authority.sign().write(certificate, key)
    files = {"tls_certificate": f'"{certificate}"', "tls_key": f'"{key}"'}
    settings = ServerSettings(buckets=BUCKETS, domains=("s3.localhost",), sections={"server": files})
    with ServerProcess(directory / "server", settings) as running:
        assert running.endpoint.startswith("https://")
        yield running


def boto3_client(server: ServerProcess, authority: Authority | None, host: str = "", **options: object) -> S3Client:
    """`authority` None: the system's, which do not know the server's certificate."""
    credentials = server.credentials()
    settings: dict[str, object] = {"retries": {"max_attempts": 0}, "s3": {"addressing_style": "path"}, **options}
    return boto3.client(
        "s3",
        endpoint_url=f"https://{host}:{server.port}" if host else server.endpoint,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        region_name=credentials.region,
        verify=None if authority is None else str(authority.bundle),
        config=Config(**settings),
    )


@pytest.fixture(scope="module")
def client(server: ServerProcess, authority: Authority) -> Iterator[S3Client]:
    made = boto3_client(server, authority)
    made.create_bucket(Bucket=BUCKET)
    yield made
    made.close()


def read(client: S3Client, key: str, bucket: str = BUCKET, **more: object) -> bytes:
    with client.get_object(Bucket=bucket, Key=key, **more)["Body"] as stream:
        body: bytes = stream.read()
    return body


def as_sent(client: S3Client, sent: list[dict[str, str]]) -> None:
    """Note the fields of the requests that the client sends from here on."""

    def note(request: object, **_: object) -> None:
        fields = getattr(request, "headers", {})
        sent.append({name.lower(): v.decode() if isinstance(v, bytes) else str(v) for name, v in fields.items()})

    client.meta.events.register("before-send.s3", note)


# -- boto3 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [BUCKET, "chunks", "chunks-local"])
@pytest.mark.parametrize("size", [0, 1, 65_536, 3 * MIB + 1])
def test_bodies_go_in_with_a_trailer_and_come_out(
    server: ServerProcess, authority: Authority, client: S3Client, bucket: str, size: int
) -> None:
    body, key = body_of(size), f"sized-{size}"
    sent: list[dict[str, str]] = []
    observed = boto3_client(server, authority)
    as_sent(observed, sent)
    observed.put_object(Bucket=bucket, Key=key, Body=body)
    observed.close()
    (fields,) = sent
    assert fields["x-amz-content-sha256"] == "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    assert fields["transfer-encoding"] == "chunked"
    assert "content-length" not in fields
    assert fields["x-amz-decoded-content-length"] == str(size)
    assert fields["expect"] == "100-continue"
    assert read(client, key, bucket) == body
    head = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
    assert (head["ContentLength"], "aws-chunked" in head.get("ContentEncoding", "")) == (size, False)
    if bucket == BUCKET:
        assert head["ChecksumCRC32"]


@pytest.mark.parametrize("algorithm", ["CRC32C", "CRC64NVME", "SHA256"])
def test_a_trailer_of_another_algorithm_is_verified_and_kept(client: S3Client, algorithm: str) -> None:
    put = client.put_object(Bucket=BUCKET, Key="summed", Body=body_of(200_000), ChecksumAlgorithm=algorithm)
    got = client.get_object(Bucket=BUCKET, Key="summed", ChecksumMode="ENABLED")
    with got["Body"] as stream:
        assert stream.read() == body_of(200_000)
    assert put[f"Checksum{algorithm}"] == got[f"Checksum{algorithm}"]


def test_a_refusal_comes_before_the_body_and_the_connection_goes_on(client: S3Client) -> None:
    client.put_object(Bucket=BUCKET, Key="once", Body=b"first")
    for _ in range(3):
        with pytest.raises(ClientError) as refused:
            client.put_object(Bucket=BUCKET, Key="once", Body=body_of(2 * MIB), IfNoneMatch="*")
        assert refused.value.response["Error"]["Code"] == "PreconditionFailed"
        assert read(client, "once") == b"first"


def test_parts_are_uploaded_and_copied(client: S3Client) -> None:
    pieces = [body_of(PART_BYTES, 1), body_of(PART_BYTES, 2), body_of(77, 3)]
    client.put_object(Bucket=BUCKET, Key="source", Body=pieces[1])
    place = {"Bucket": BUCKET, "Key": "in-parts"}
    place |= {"UploadId": client.create_multipart_upload(**place)["UploadId"]}
    tags = {
        1: client.upload_part(**place, PartNumber=1, Body=pieces[0])["ETag"],
        2: client.upload_part_copy(**place, PartNumber=2, CopySource=f"{BUCKET}/source")["CopyPartResult"]["ETag"],
        3: client.upload_part(**place, PartNumber=3, Body=pieces[2])["ETag"],
    }
    parts = [{"PartNumber": number, "ETag": tag} for number, tag in tags.items()]
    client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
    client.copy_object(Bucket=BUCKET, Key="copied", CopySource=f"{BUCKET}/in-parts")
    assert read(client, "in-parts") == read(client, "copied") == b"".join(pieces)
    assert read(client, "copied", Range=f"bytes={PART_BYTES - 3}-{PART_BYTES + 2}") == pieces[0][-3:] + pieces[1][:3]


def test_large_bodies_are_moved_whole_in_parts_and_by_many_at_once(client: S3Client, tmp_path: Path) -> None:
    client.put_object(Bucket=BUCKET, Key="large", Body=LARGE)
    with ThreadPoolExecutor(4) as pool:
        assert all(body == LARGE for body in pool.map(lambda _: read(client, "large"), range(4)))
    (tmp_path / "up").write_bytes(LARGE)
    config = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=4)
    client.upload_file(str(tmp_path / "up"), BUCKET, "transferred", Config=config)
    client.download_file(BUCKET, "transferred", str(tmp_path / "down"), Config=config)
    assert (tmp_path / "down").read_bytes() == LARGE


def test_a_server_that_nobody_vouches_for_is_not_talked_to(server: ServerProcess) -> None:
    stranger = boto3_client(server, None)
    with pytest.raises(SSLError):
        stranger.list_buckets()
    stranger.close()


def test_virtual_hosted_style(
    server: ServerProcess, authority: Authority, client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def resolve_localhost(host: str, *rest: object, **named: object) -> object:
        return resolve("127.0.0.1" if host.endswith("localhost") else host, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve_localhost)
    hosted = boto3_client(server, authority, "s3.localhost", s3={"addressing_style": "virtual"})
    hosted.put_object(Bucket=BUCKET, Key="hosted", Body=b"hosted")
    assert read(hosted, "hosted") == read(client, "hosted") == b"hosted"
    hosted.close()


# -- aiobotocore, awscrt -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("client")
async def test_aiobotocore_moves_many_objects_at_once(server: ServerProcess, authority: Authority) -> None:
    credentials = server.credentials()
    bodies = {f"at-once/{number}": body_of(1 + number * 97_003, number) for number in range(16)}

    async with aiobotocore.session.get_session().create_client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=credentials.access_key,
        aws_secret_access_key=credentials.secret_key,
        region_name=credentials.region,
        verify=str(authority.bundle),
        config=AioConfig(s3={"addressing_style": "path"}, retries={"max_attempts": 0}),
    ) as client:

        async def read_back(key: str) -> bytes:
            reply = await client.get_object(Bucket=BUCKET, Key=key)
            async with reply["Body"] as stream:
                body: bytes = await stream.read()
            return body

        await asyncio.gather(*(client.put_object(Bucket=BUCKET, Key=key, Body=body) for key, body in bodies.items()))
        assert await asyncio.gather(*(read_back(key) for key in bodies)) == list(bodies.values())
        listed = await client.list_objects_v2(Bucket=BUCKET, Prefix="at-once/")
        assert [item["Key"] for item in listed["Contents"]] == sorted(bodies)


@pytest.mark.usefixtures("client")
def test_awscrt_offers_http_2_and_takes_http_1_1(server: ServerProcess, authority: Authority) -> None:
    credentials = server.credentials()
    group = io.EventLoopGroup(1)
    options = io.TlsContextOptions()
    options.override_default_trust_store_from_path(None, str(authority.bundle))
    options.alpn_list = ["h2", "http/1.1"]
    connection_options = io.ClientTlsContext(options).new_connection_options()
    connection_options.set_server_name("localhost")
    client = s3.S3Client(
        bootstrap=io.ClientBootstrap(group, io.DefaultHostResolver(group)),
        region=credentials.region,
        credential_provider=auth.AwsCredentialsProvider.new_static(credentials.access_key, credentials.secret_key),
        tls_mode=s3.S3RequestTlsMode.ENABLED,
        tls_connection_options=connection_options,
        part_size=PART_BYTES,
    )

    def send(kind: s3.S3RequestType, method: str, body: bytes = b"") -> bytes:
        headers = http.HttpHeaders([("Host", f"localhost:{server.port}")])
        if body:
            headers.add("Content-Length", str(len(body)))
        received = bytearray(len(LARGE))

        def on_body(chunk: bytes, offset: int, **_: object) -> None:
            received[offset : offset + len(chunk)] = chunk

        request = http.HttpRequest(method, f"/{BUCKET}/awscrt", headers, BytesIO(body) if body else None)
        finished: Future[None] = client.make_request(type=kind, request=request, on_body=on_body).finished_future
        finished.result(60)
        return bytes(received)

    send(s3.S3RequestType.PUT_OBJECT, "PUT", LARGE)  # in parts
    assert send(s3.S3RequestType.GET_OBJECT, "GET") == LARGE


# -- command lines -----------------------------------------------------------------------------------------------------


def run(command: list[str], server: ServerProcess, home: Path, authority: Authority) -> str:
    credentials = server.credentials()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "AWS_ACCESS_KEY_ID": credentials.access_key,
        "AWS_SECRET_ACCESS_KEY": credentials.secret_key,
        "AWS_DEFAULT_REGION": credentials.region,
        "AWS_EC2_METADATA_DISABLED": "true",
        "RCLONE_CONFIG": str(home / "rclone.conf"),
        "RCLONE_CA_CERT": str(authority.bundle),
        "RCLONE_CONFIG_KVOBJ_TYPE": "s3",
        "RCLONE_CONFIG_KVOBJ_PROVIDER": "Other",
        "RCLONE_CONFIG_KVOBJ_ENV_AUTH": "true",
        "RCLONE_CONFIG_KVOBJ_ENDPOINT": server.endpoint,
        "RCLONE_CONFIG_KVOBJ_REGION": credentials.region,
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{server.log_tail(10)}"
    return done.stdout


@pytest.mark.usefixtures("client")
def test_the_aws_command_line_puts_and_gets(server: ServerProcess, authority: Authority, tmp_path: Path) -> None:
    aws = [str(client_binary("aws")), "--endpoint-url", server.endpoint, "--ca-bundle", str(authority.bundle)]
    body = body_of(9 * MIB)
    (tmp_path / "up").write_bytes(body)
    run([*aws, "s3", "cp", "--no-progress", "up", f"s3://{BUCKET}/aws"], server, tmp_path, authority)
    run([*aws, "s3", "cp", "--no-progress", f"s3://{BUCKET}/aws", "down"], server, tmp_path, authority)
    assert (tmp_path / "down").read_bytes() == body


@pytest.mark.usefixtures("client")
def test_rclone_puts_and_checks(server: ServerProcess, authority: Authority, tmp_path: Path) -> None:
    rclone = [str(client_binary("rclone")), "--retries", "1", "--low-level-retries", "1"]
    tree = {"a.bin": 10, "sub/b.bin": 6 * MIB}
    for name, size in tree.items():
        (tmp_path / "up" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "up" / name).write_bytes(body_of(size))
    parts = ["--s3-upload-cutoff", "5Mi", "--s3-chunk-size", "5Mi"]
    run([*rclone, "copy", *parts, "up", f"kvobj:{BUCKET}/rclone"], server, tmp_path, authority)
    run([*rclone, "check", "--download", "up", f"kvobj:{BUCKET}/rclone"], server, tmp_path, authority)
    listed = json.loads(
        run([*rclone, "lsjson", "-R", "--files-only", f"kvobj:{BUCKET}/rclone"], server, tmp_path, authority)
    )
    assert {entry["Path"]: entry["Size"] for entry in listed} == tree
