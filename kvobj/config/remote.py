"""Reads the remote tier of `[[tiers]]`: an S3 server of somebody's, so its names and credentials follow their rules and not
ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvobj.config.bucket_name import bucket_name_problem
from kvobj.config.settings import AddressingName, RemoteChecksumsName, RemoteSettings
from kvobj.config.table_reader import TableReader

_MIB: Final = 2**20
_TIB: Final = 2**40
_PREFIX: Final = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]*/)*")
_PREFIX_CHARACTERS_MAX: Final = 200
_PRINTABLE: Final = re.compile(r"[!-~]{1,1024}")
_HEDGE: Final = ("adaptive", "off")


def read_remote(reader: TableReader, environment: Mapping[str, str]) -> RemoteSettings:
    """The tier's settings; of a table with problems, whatever could be read."""
    default = RemoteSettings(endpoint="", bucket="", access_key="", secret_key="")
    endpoint = read_endpoint(reader)
    bucket = reader.required_text("bucket")
    if bucket and (problem := bucket_name_problem(bucket)):
        reader.report("bucket", problem)
    addressing: AddressingName = reader.choice("addressing", ("path", "virtual"), default.addressing)
    checksums: RemoteChecksumsName = reader.choice("checksums", ("auto", "sha256", "crc32c", "none"), default.checksums)
    if checksums == "none" and endpoint.startswith("http://"):
        reader.report("checksums", "none is for https alone: nothing else would see a byte that changes on its way")
    ca_bundle = reader.optional_text("ca_bundle")
    return RemoteSettings(
        endpoint=endpoint,
        bucket=bucket,
        prefix=_prefix(reader),
        region=reader.text("region", default.region),
        access_key=read_access_key(reader),
        secret_key=read_secret_key(reader, environment),
        addressing=addressing,
        part_bytes=reader.size_bytes("part_size", default.part_bytes, low=5 * _MIB, high=128 * _MIB),
        connections=reader.whole_number("connections", default.connections, low=1, high=1024),
        connect_timeout_seconds=reader.seconds("connect_timeout", default.connect_timeout_seconds, high=600.0),
        request_timeout_seconds=reader.seconds("request_timeout", default.request_timeout_seconds, high=3600.0),
        operation_timeout_seconds=reader.seconds("operation_timeout", default.operation_timeout_seconds, high=86400.0),
        stall_timeout_seconds=reader.seconds("stall_timeout", default.stall_timeout_seconds, low=0.01, high=600.0),
        hedge_seconds=_hedge(reader),
        ca_bundle=None if ca_bundle is None else Path(ca_bundle),
        checksums=checksums,
        queue_bytes=reader.size_bytes("queue_size", default.queue_bytes, low=_MIB, high=1024 * _TIB),
        outbox_bytes=reader.size_bytes("outbox_size", default.outbox_bytes, low=_MIB // 16, high=_TIB),
        manifest_interval_seconds=reader.seconds("manifest_interval", default.manifest_interval_seconds, high=3600.0),
        share_timeout_seconds=reader.seconds("share_timeout", default.share_timeout_seconds, low=0.1, high=3600.0),
    )


def read_endpoint(reader: TableReader) -> str:
    """`scheme://host[:port]`, without a slash behind it."""
    endpoint = reader.required_text("endpoint")
    if not endpoint:
        return ""
    try:
        parts = urlsplit(endpoint)
        is_endpoint = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and parts.path in ("", "/")
            and "@" not in parts.netloc
            and not parts.query
            and not parts.fragment
            and _PRINTABLE.fullmatch(endpoint) is not None
        )
    except ValueError:
        is_endpoint = False
    if not is_endpoint:
        reader.report("endpoint", f"must be like https://s3.example.com or http://10.0.0.1:7480, not {endpoint!r}")
        return ""
    return endpoint.rstrip("/")


def _prefix(reader: TableReader) -> str:
    """Empty, or with a slash at its end."""
    prefix = reader.optional_text("prefix")
    if prefix is None:
        return ""
    whole = prefix if prefix.endswith("/") else f"{prefix}/"
    if not _PREFIX.fullmatch(whole) or len(whole) > _PREFIX_CHARACTERS_MAX:
        reader.report(
            "prefix",
            "must be names of letters, digits, dots, underscores and hyphens, none beginning with a dot, with slashes between "
            f"them, {_PREFIX_CHARACTERS_MAX} characters at most, not {prefix!r}",
        )
        return ""
    return whole


def read_access_key(reader: TableReader) -> str:
    """Somebody else's access key, by their rules."""
    access_key = reader.required_text("access_key")
    if access_key and (not _PRINTABLE.fullmatch(access_key) or any(mark in access_key for mark in "/,=")):
        reader.report("access_key", "must be printable ASCII without blanks, slashes, commas and equals signs")
        return ""
    return access_key


def read_secret_key(reader: TableReader, environment: Mapping[str, str]) -> str:
    """A secret key that is written down, or that the environment has."""
    written = reader.optional_text("secret_key")
    variable = reader.optional_text("secret_key_env")
    if (written is None) == (variable is None):
        reader.report("secret_key", "exactly one of secret_key and secret_key_env must be there")
        return ""
    if variable is not None and not environment.get(variable):
        reader.report("secret_key_env", f"the environment has no {variable}")
        return ""
    secret = environment[variable] if variable is not None else written or ""
    if not _PRINTABLE.fullmatch(secret):
        reader.report("secret_key" if variable is None else "secret_key_env", "must be printable ASCII without blanks")
        return ""
    return secret


def _hedge(reader: TableReader) -> float | None:
    """None: by what the server's answers take; 0: never."""
    written = reader.optional_text("hedge")
    if written is None or written == "adaptive":
        return None
    if written == "off":
        return 0.0
    seconds = reader.seconds("hedge", 1.0, low=0.001, high=600.0) if written[:1].isdigit() else None
    if seconds is None:
        reader.report("hedge", f'must be {" or ".join(_HEDGE)} or a duration like "200 ms", not {written!r}')
    return seconds
