"""The users and buckets that a configuration declares, which every start puts into the catalog."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

from kvobj.catalog.protocol import Catalog
from kvobj.catalog.rows import BucketKind, BucketRow, Durability, UserRow
from kvobj.catalog.setting_rows import RemoteRule
from kvobj.clock import Clock
from kvobj.config.settings import BUCKET_FIELDS, BucketSettings, Settings
from kvobj.data_directory import DataDirectory
from kvobj.errors import BucketExistsError

ROOT_USER_ID: Final = "root"


async def declare(settings: Settings, data: DataDirectory, catalog: Catalog, clock: Clock) -> tuple[str, ...]:
    """Put the root user and those of the configuration into the catalog, and make its buckets that are not there. A note of each
    that stands otherwise than the configuration says."""
    root = data.root_credentials(settings.root_credentials)
    await catalog.put_user(
        UserRow(
            id=ROOT_USER_ID,
            display_name=ROOT_USER_ID,
            access_key=root.access_key,
            secret_key=root.secret_key,
            is_root=True,
        )
    )
    for user in settings.users:
        await catalog.put_user(
            UserRow(
                id=user.id,
                display_name=user.display_name,
                access_key=user.access_key,
                secret_key=user.secret_key,
            )
        )
    notes: list[str] = []
    for bucket in settings.buckets:
        row = _bucket_row(bucket, settings.server.region, clock)
        try:
            await catalog.create_bucket(row)
        except BucketExistsError:
            standing = await catalog.bucket(bucket.name)
            if standing is not None:
                notes += _differences(standing, row, bucket.stated)
    return tuple(notes)


def _differences(standing: BucketRow, said: BucketRow, stated: AbstractSet[str]) -> list[str]:
    """One note, where a field that the configuration states is another in the bucket that stands."""
    fields = [name for name in BUCKET_FIELDS if name in stated and getattr(standing, name) != getattr(said, name)]
    if not fields:
        return []
    stands, says = (" ".join(f"{name}={getattr(row, name)}" for name in fields) for row in (standing, said))
    return [f"bucket {standing.name} stands with {stands}; the configuration says {says}: left as it is"]


def _bucket_row(bucket: BucketSettings, region: str, clock: Clock) -> BucketRow:
    return BucketRow(
        name=bucket.name,
        kind=BucketKind(bucket.kind),
        owner=bucket.owner,
        created_ms=clock.now_ms(),
        durability=Durability(bucket.durability),
        codec=bucket.codec,
        region=region,
        remote=RemoteRule(bucket.remote),
    )
