"""deltalake: a table whose commits are objects that must be made once, by conditional PUT and without a lock elsewhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from given import given, report

WRITERS = 4

place = given()
options = {
    "AWS_ENDPOINT_URL": place.bucket_endpoint if place.is_virtual_hosted else place.endpoint,
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": str(place.is_virtual_hosted).lower(),
    "AWS_ACCESS_KEY_ID": place.access_key,
    "AWS_SECRET_ACCESS_KEY": place.secret_key,
    "AWS_REGION": place.region,
    "AWS_ALLOW_HTTP": "true",
    "AWS_CONDITIONAL_PUT": "etag",
}
uri = place.uri("table")


def rows_of(writer: int) -> pa.Table:
    return pa.table({"writer": [writer] * 1000, "id": list(range(1000))})


write_deltalake(uri, rows_of(0), storage_options=options)
with ThreadPoolExecutor(WRITERS) as threads:  # each commit number can be had by one of them only
    done = [
        threads.submit(write_deltalake, uri, rows_of(writer), mode="append", storage_options=options)
        for writer in range(1, 1 + WRITERS)
    ]
    for one in done:
        one.result(60)
table = DeltaTable(uri, storage_options=options)
assert table.version() == WRITERS
found = table.to_pyarrow_table()
expected = [(writer, number) for writer in range(1 + WRITERS) for number in range(1000)]
assert sorted(zip(found["writer"].to_pylist(), found["id"].to_pylist(), strict=True)) == expected
table.delete("writer = 2")
table.optimize.compact()
table.create_checkpoint()
table = DeltaTable(uri, storage_options=options)
assert table.to_pyarrow_table().num_rows == WRITERS * 1000
assert table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
assert DeltaTable(uri, storage_options=options).to_pyarrow_table().num_rows == WRITERS * 1000
report("deltalake")
