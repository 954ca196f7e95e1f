"""Reads `[[upstreams]]`: KV buckets of this store that are also asked for at another kvobj, each at the same bucket there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvobj.config.bucket_name import bucket_name_problem
from kvobj.config.remote import read_access_key, read_endpoint, read_secret_key
from kvobj.config.settings import AddressingName, BucketSettings, DurabilityName, RemoteSettings, UpstreamSettings
from kvobj.config.table_reader import TableReader


def read_upstream(reader: TableReader, environment: Mapping[str, str]) -> UpstreamSettings:
    """One table's settings; of a table with problems, whatever could be read."""
    default = UpstreamSettings(bucket="", server=RemoteSettings("", "", "", ""))
    bucket = _bucket(reader, "bucket", required=True)
    remote_bucket = _bucket(reader, "remote_bucket", required=False) or bucket
    addressing: AddressingName = reader.choice("addressing", ("path", "virtual"), "path")
    durability: DurabilityName = reader.choice("durability", ("memory", "local", "shared"), default.durability)
    ca_bundle = reader.optional_text("ca_bundle")
    timeout_seconds = reader.seconds("timeout", default.timeout_seconds, low=0.01, high=3600.0)
    server = RemoteSettings(
        endpoint=read_endpoint(reader),
        bucket=remote_bucket,
        access_key=read_access_key(reader),
        secret_key=read_secret_key(reader, environment),
        region=reader.text("region", default.server.region),
        addressing=addressing,
        connections=reader.whole_number("connections", default.server.connections, low=1, high=1024),
        connect_timeout_seconds=reader.seconds("connect_timeout", 2.0, high=600.0),
        request_timeout_seconds=timeout_seconds,
        operation_timeout_seconds=timeout_seconds,
        ca_bundle=None if ca_bundle is None else Path(ca_bundle),
    )
    reader.finish()
    return UpstreamSettings(bucket=bucket, server=server, timeout_seconds=timeout_seconds, durability=durability)


def check_upstreams(
    upstreams: tuple[UpstreamSettings, ...], buckets: tuple[BucketSettings, ...], problems: list[str]
) -> None:
    """The rules that hold between them and the buckets of the file."""
    kinds = {bucket.name: bucket.kind for bucket in buckets}
    seen: dict[str, int] = {}
    for position, upstream in enumerate(upstreams):
        name = upstream.bucket
        if name in seen:
            problems.append(f"upstreams[{position}].bucket: {name} has an upstream already, upstreams[{seen[name]}]")
        elif name:
            seen[name] = position
        if kinds.get(name, "kv") != "kv":
            problems.append(
                f"upstreams[{position}].bucket: {name} is ordinary, and only buckets of kind kv have upstreams"
            )


def _bucket(reader: TableReader, key: str, *, required: bool) -> str:
    name = reader.required_text(key) if required else reader.optional_text(key) or ""
    if name and (problem := bucket_name_problem(name)):
        reader.report(key, problem)
    return name
