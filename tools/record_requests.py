"""Records what real clients put on the wire: the seed corpus of the fuzz targets (tests/fuzz/corpus/requests).

A proxy that changes nothing stands in front of a `kvobj serve` with throw-away credentials; boto3, aiobotocore, the aws CLI and
rclone each do their everyday work through it. One request of each shape (client, method, parameters' and headers' names) is
kept, as the bytes that were sent; bodies are cut after 512 bytes. Needs the clients: `make client-envs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from command_line import Parser, run_tool

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "clients"))

import boto3
from aiobotocore.session import get_session
from botocore.config import Config
from botocore.exceptions import ClientError
from client_suite import client_binary
from server_process import MIB, BucketSetting, ServerProcess, ServerSettings

CORPUS: Final = Path(__file__).resolve().parent.parent / "tests" / "fuzz" / "corpus" / "requests"
BODY_BYTES: Final = 512
_END: Final = b"\r\n\r\n"
_KERNEL: Final = re.compile(rb"os/linux#[^ \r]+").sub


class Recorder:
    """A transparent proxy to one port; keeps what clients sent, a stream a connection."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.streams: list[bytearray] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            kept = bytearray()
            self.streams.append(kept)
            threading.Thread(target=_pump, args=(client, server, kept), daemon=True).start()
            threading.Thread(target=_pump, args=(server, client, None), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(65536):
            if kept is not None:
                kept += piece
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)


def cut_requests(stream: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Heads and bodies (as framed) of a connection's requests, in order."""
    at = 0
    while (end := stream.find(_END, at)) >= 0:
        head = stream[at : end + len(_END)]
        at = end + len(_END)
        length = re.search(rb"(?im)^content-length: *(\d+)", head)
        if re.search(rb"(?im)^transfer-encoding: *chunked", head):
            stop = stream.find(b"0\r\n\r\n", at)
            stop = len(stream) if stop < 0 else stop + 5
        else:
            stop = at + (int(length[1]) if length else 0)
        yield head, stream[at:stop]
        at = stop


def shape_of(head: bytes) -> tuple[str, str]:
    """What makes a request worth keeping beside another, and a name for it."""
    request_line, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = request_line.split(" ")
    path, _, query = target.partition("?")
    names = sorted(line.partition(":")[0].lower() for line in lines if line)
    parameters = sorted({pair.partition("=")[0] for pair in query.split("&") if pair})
    level = "service" if path == "/" else "object" if path.strip("/").count("/") else "bucket"
    name = re.sub(r"[^a-z0-9-]+", "-", "-".join([method, level, *parameters[:2]]).lower())
    return f"{method} {level} {parameters} {names}", name


def work_with_boto3(endpoint: str, key: str, secret: str) -> None:
    """Most of what an S3 program does."""
    client: Any = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        region_name="us-east-1",
        config=Config(signature_version="s3v4", s3={"addressing_style": "path"}, retries={"max_attempts": 1}),
    )
    place = {"Bucket": "recorded", "Key": "a folder/ключ +%.bin"}
    client.create_bucket(Bucket="recorded")
    client.create_bucket(Bucket="recorded-here", CreateBucketConfiguration={"LocationConstraint": "us-east-1"})
    client.list_buckets()
    client.head_bucket(Bucket="recorded")
    client.put_object(**place, Body=b"body" * 100, Metadata={"colour": "blue"}, ContentType="text/plain")
    client.put_object(**place, Body=b"crc", ChecksumAlgorithm="CRC64NVME", CacheControl="no-cache")
    client.put_object(**place, Body=b"sha", ChecksumAlgorithm="SHA256", IfNoneMatch='"no such etag"')
    etag = client.get_object(**place)["ETag"]
    client.get_object(**place, Range="bytes=1-2", IfMatch=etag, ChecksumMode="ENABLED")
    client.get_object(**place, ResponseContentType="text/css", ResponseCacheControl="no-store")
    client.head_object(**place, PartNumber=1)
    client.copy_object(
        Bucket="recorded", Key="copy", CopySource=place, MetadataDirective="REPLACE", Metadata={"a": "b"}
    )
    client.copy_object(Bucket="recorded", Key="copy2", CopySource=place, CopySourceIfMatch=etag)
    client.list_objects_v2(Bucket="recorded", Prefix="a f", Delimiter="/", MaxKeys=5, FetchOwner=True, StartAfter="a")
    client.list_objects(Bucket="recorded", Marker="a", EncodingType="url")
    client.list_object_versions(Bucket="recorded")
    parts = {"Bucket": "recorded", "Key": "parts"}
    upload = client.create_multipart_upload(**parts, ChecksumAlgorithm="CRC32")["UploadId"]
    part = client.upload_part(**parts, UploadId=upload, PartNumber=1, Body=b"p" * 5 * MIB, ChecksumAlgorithm="CRC32")
    copied = client.upload_part_copy(
        **parts, UploadId=upload, PartNumber=2, CopySource=place, CopySourceRange="bytes=0-2"
    )["CopyPartResult"]
    client.list_parts(**parts, UploadId=upload, MaxParts=2, PartNumberMarker=0)
    client.list_multipart_uploads(Bucket="recorded", Prefix="p")
    listed = [
        {"PartNumber": 1, "ETag": part["ETag"], "ChecksumCRC32": part["ChecksumCRC32"]},
        {"PartNumber": 2, "ETag": copied["ETag"], "ChecksumCRC32": copied["ChecksumCRC32"]},
    ]
    client.complete_multipart_upload(**parts, UploadId=upload, MultipartUpload={"Parts": listed}, IfNoneMatch="*")
    upload = client.create_multipart_upload(**parts)["UploadId"]
    client.abort_multipart_upload(**parts, UploadId=upload)
    _try_what_may_be_refused(client, place)
    client.delete_object(Bucket="recorded", Key="copy2")
    url = client.generate_presigned_url("get_object", Params=place, ExpiresIn=60)
    subprocess.run(["curl", "-s", "-o", "/dev/null", url], check=False)
    client.delete_objects(Bucket="recorded", Delete={"Objects": [{"Key": "copy"}, {"Key": "parts"}], "Quiet": True})


def _try_what_may_be_refused(client: Any, place: dict[str, str]) -> None:  # noqa: ANN401 - its class is made at run time
    bucket = {"Bucket": "recorded"}
    tags = {"TagSet": [{"Key": "a", "Value": "b c"}]}
    rule = {"ID": "old", "Status": "Enabled", "Filter": {"Prefix": "tmp/"}, "Expiration": {"Days": 3}}
    cors = {"AllowedMethods": ["GET"], "AllowedOrigins": ["*"], "MaxAgeSeconds": 60}
    policy = (
        '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Principal":"*","Action":"s3:GetObject",'
        '"Resource":"arn:aws:s3:::recorded/*","Condition":{"IpAddress":{"aws:SourceIp":"127.0.0.0/8"}}}]}'
    )
    grants = {
        "Owner": {"ID": "root"},
        "Grants": [{"Grantee": {"Type": "CanonicalUser", "ID": "root"}, "Permission": "FULL_CONTROL"}],
    }
    calls: list[Callable[[], object]] = [
        lambda: client.get_bucket_location(**bucket),
        lambda: client.get_bucket_versioning(**bucket),
        lambda: client.get_bucket_acl(**bucket),
        lambda: client.get_object_acl(**place),
        lambda: client.put_bucket_acl(**bucket, ACL="public-read"),
        lambda: client.put_object_acl(**place, AccessControlPolicy=grants),
        lambda: client.put_object_tagging(**place, Tagging=tags),
        lambda: client.get_object_tagging(**place),
        lambda: client.put_bucket_tagging(**bucket, Tagging=tags),
        lambda: client.put_bucket_lifecycle_configuration(**bucket, LifecycleConfiguration={"Rules": [rule]}),
        lambda: client.put_bucket_cors(**bucket, CORSConfiguration={"CORSRules": [cors]}),
        lambda: client.put_bucket_policy(**bucket, Policy=policy),
        lambda: client.get_bucket_policy(**bucket),
        lambda: client.delete_bucket_policy(**bucket),
        lambda: client.get_object_attributes(**place, ObjectAttributes=["ETag", "ObjectParts"]),
        lambda: client.put_object(**place, Body=b"tagged", Tagging="a=b&c=d", ACL="private"),
        lambda: client.delete_object(**place, IfMatch='"no such etag"'),
    ]
    for call in calls:
        with contextlib.suppress(ClientError):
            call()


def work_with_aiobotocore(endpoint: str, key: str, secret: str) -> None:
    """A put and a read, as async programs send them."""

    async def work() -> None:
        async with get_session().create_client(
            "s3", endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=secret, region_name="us-east-1"
        ) as client:
            await client.put_object(Bucket="recorded", Key="async", Body=b"async body")
            found = await client.get_object(Bucket="recorded", Key="async", Range="bytes=0-4")
            await found["Body"].read()
            await client.delete_objects(Bucket="recorded", Delete={"Objects": [{"Key": "async"}]})

    asyncio.run(work())


def work_with_commands(commands: list[list[str]], endpoint: str, key: str, secret: str, home: str) -> None:
    """Run commands of the aws CLI or rclone; one that is refused has sent its request all the same."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": home,
        "LC_ALL": "C.UTF-8",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RCLONE_CONFIG": f"{home}/rclone.conf",
        "RCLONE_CONFIG_K_TYPE": "s3",
        "RCLONE_CONFIG_K_PROVIDER": "Other",
        "RCLONE_CONFIG_K_ENV_AUTH": "true",
        "RCLONE_CONFIG_K_ENDPOINT": endpoint,
        "RCLONE_CONFIG_K_REGION": "us-east-1",
    }
    for command in commands:
        subprocess.run(command, env=environment, cwd=home, capture_output=True, timeout=120, check=False)


def _commands(endpoint: str, home: str) -> dict[str, list[list[str]]]:
    big = Path(home) / "big.bin"
    big.write_bytes(b"0123456789abcdef" * (9 * MIB // 16))
    (Path(home) / "small ü.txt").write_text("small")
    aws = [str(client_binary("aws")), "--endpoint-url", endpoint]
    rclone = [str(client_binary("rclone")), "--retries", "1", "--s3-chunk-size", "5Mi", "--s3-upload-cutoff", "6Mi"]
    return {
        "aws-cli": [
            [*aws, "s3", "mb", "s3://recorded-cli"],
            [*aws, "s3", "cp", "--no-progress", "big.bin", "s3://recorded-cli/big.bin"],
            [*aws, "s3", "cp", "--no-progress", "small ü.txt", "s3://recorded-cli/small ü.txt"],
            [*aws, "s3", "ls", "--recursive", "s3://recorded-cli/"],
            [*aws, "s3", "cp", "--no-progress", "s3://recorded-cli/big.bin", "back.bin"],
            [*aws, "s3", "cp", "s3://recorded-cli/big.bin", "s3://recorded-cli/copy.bin"],
            [*aws, "s3api", "head-object", "--bucket", "recorded-cli", "--key", "big.bin"],
            [*aws, "s3", "rm", "--recursive", "s3://recorded-cli/"],
            [*aws, "s3", "rb", "s3://recorded-cli"],
        ],
        "rclone": [
            [*rclone, "copy", "big.bin", "k:recorded-rclone/dir"],
            [*rclone, "copy", "small ü.txt", "k:recorded-rclone/dir"],
            [*rclone, "lsf", "-R", "k:recorded-rclone"],
            [*rclone, "cat", "--offset", "3", "--count", "5", "k:recorded-rclone/dir/small ü.txt"],
            [*rclone, "copyto", "k:recorded-rclone/dir/big.bin", "k:recorded-rclone/copy.bin"],
            [*rclone, "purge", "k:recorded-rclone"],
        ],
    }


def main() -> None:
    """Record every client, and write what is new in shape."""
    parser = Parser(__doc__)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="the folder to write to")
    corpus: Path = parser.parse_args().corpus
    corpus.mkdir(parents=True, exist_ok=True)
    settings = ServerSettings(dram_bytes=64 * MIB, buckets=(BucketSetting("chunks", "kv", "memory"),))
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder) / "server", settings) as server:
        keys = server.credentials()
        works: dict[str, Callable[[str, str, str], None]] = {
            "boto3": work_with_boto3,
            "aiobotocore": work_with_aiobotocore,
        }
        for client in ("boto3", "aiobotocore", "aws-cli", "rclone"):
            recorder = Recorder(server.host, server.port)
            endpoint = f"http://127.0.0.1:{recorder.port}"
            if client in works:
                works[client](endpoint, keys.access_key, keys.secret_key)
            else:
                work_with_commands(
                    _commands(endpoint, folder)[client], endpoint, keys.access_key, keys.secret_key, folder
                )
            recorder.close()
            seen: set[str] = set()
            for stream in recorder.streams:
                for head, body in cut_requests(bytes(stream)):
                    shape, name = shape_of(head)
                    if shape not in seen:
                        seen.add(shape)
                        kept = _KERNEL(b"os/linux#6.1", head) + body[:BODY_BYTES]  # of the machine nothing is told
                        (corpus / f"{client}-{len(seen):02d}-{name}.http").write_bytes(kept)
            print(f"{client}: {len(seen)} shapes of requests")


if __name__ == "__main__":
    run_tool(main)
