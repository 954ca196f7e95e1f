"""DuckDB through fsspec: tables copied to Parquet files of a bucket and asked where they lie."""

from __future__ import annotations

import duckdb
import s3fs
from given import given, report

ROWS = 300_000

place = given()
files = s3fs.S3FileSystem(
    key=place.access_key,
    secret=place.secret_key,
    endpoint_url=place.endpoint,
    client_kwargs={"region_name": place.region},
    config_kwargs={"s3": {"addressing_style": "virtual" if place.is_virtual_hosted else "path"}},
)
connection = duckdb.connect()
connection.register_filesystem(files)
connection.execute(f"CREATE TABLE numbers AS SELECT i AS id, i % 5 AS part, hash(i) AS mixed FROM range({ROWS}) t(i)")  # noqa: S608
connection.execute(f"COPY numbers TO '{place.uri('one.parquet')}' (FORMAT parquet, ROW_GROUP_SIZE 30000)")
connection.execute(f"COPY numbers TO '{place.uri('one.csv')}' (FORMAT csv)")
for part in range(5):
    connection.execute(f"COPY (SELECT * FROM numbers WHERE part = {part}) TO '{place.uri(f'many/{part}.parquet')}'")  # noqa: S608

whole = connection.execute("SELECT count(*), sum(id), bit_xor(mixed) FROM numbers").fetchone()
for source in ("one.parquet", "many/*.parquet", "one.csv"):
    found = connection.execute(f"SELECT count(*), sum(id), bit_xor(mixed) FROM '{place.uri(source)}'").fetchone()  # noqa: S608
    assert found == whole, (source, found, whole)
few = connection.execute(f"SELECT id FROM '{place.uri('one.parquet')}' WHERE id BETWEEN 150000 AND 150002 ORDER BY id")  # noqa: S608
assert few.fetchall() == [(150_000,), (150_001,), (150_002,)]
connection.close()
assert len(files.find(f"{place.bucket}/{place.prefix}")) == 7
report("duckdb", "s3fs")
