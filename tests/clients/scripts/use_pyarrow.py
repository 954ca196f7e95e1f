"""pyarrow: its own S3 file system, and a Parquet data set written to it and read back by filter."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from given import MIB, NAMES, body_of, given, refused, report, same
from pyarrow import fs

place = given()
root = f"{place.bucket}/{place.prefix}"
files = fs.S3FileSystem(
    access_key=place.access_key,
    secret_key=place.secret_key,
    region=place.region,
    endpoint_override=place.host,
    scheme="http",
    force_virtual_addressing=place.is_virtual_hosted,
    allow_bucket_creation=True,
    allow_bucket_deletion=True,
)

for name in NAMES:
    with files.open_output_stream(f"{root}/names/{name}", metadata={"Content-Type": "text/plain"}) as stream:
        stream.write(name.encode())
    with files.open_input_stream(f"{root}/names/{name}") as stream:
        same(stream.read(), name.encode())
        assert stream.metadata()["Content-Type"] == b"text/plain"
listed = files.get_file_info(fs.FileSelector(f"{root}/names", recursive=True))
assert sorted(item.path for item in listed if item.is_file) == sorted(f"{root}/names/{name}" for name in NAMES)

body = body_of(13 * MIB + 77)
with files.open_output_stream(f"{root}/large") as stream:
    for start in range(0, len(body), MIB):
        stream.write(body[start : start + MIB])
with files.open_input_file(f"{root}/large") as file:
    assert file.size() == len(body)
    same(file.read_at(100, 10 * MIB - 50), body[10 * MIB - 50 : 10 * MIB + 50])
    same(file.read(), body)
files.copy_file(f"{root}/large", f"{root}/copied ü")
files.move(f"{root}/copied ü", f"{root}/moved")
with files.open_input_file(f"{root}/moved") as file:
    same(file.read(), body)
files.create_dir(f"{root}/folder/inside")
assert files.get_file_info(f"{root}/folder/inside").type == fs.FileType.Directory
assert files.get_file_info(f"{root}/absent").type == fs.FileType.NotFound
with refused(FileNotFoundError):
    files.open_input_file(f"{root}/absent")

# a data set: a folder a day, some row groups in each file, found again by the folder and by the rows' statistics
rows = 200_000
table = pa.table(
    {
        "day": pa.array([f"2026-01-{1 + number * 4 // rows:02d}" for number in range(rows)]),
        "id": pa.array(range(rows), pa.int64()),
        "text": pa.array([f"row {number * 7919 % rows}" for number in range(rows)]),
    }
)
layout = ds.partitioning(pa.schema([("day", pa.string())]), flavor="hive")
ds.write_dataset(
    table,
    f"{root}/table",
    filesystem=files,
    format="parquet",
    partitioning=layout,
    max_rows_per_file=20_000,
    max_rows_per_group=10_000,
)
found = ds.dataset(f"{root}/table", filesystem=files, format="parquet", partitioning=layout)
assert len(found.files) == 12
assert found.count_rows() == rows
assert found.to_table(columns=["day", "id", "text"]).sort_by("id").equals(table)
some = found.to_table(columns=["id"], filter=(pc.field("day") == "2026-01-02") & (pc.field("id") < rows // 4 + 10))
assert sorted(some["id"].to_pylist()) == list(range(rows // 4, rows // 4 + 10))

files.delete_dir_contents(root)
assert files.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True)) == []
files.create_dir("made-by-pyarrow")
files.delete_dir("made-by-pyarrow")
assert files.get_file_info("made-by-pyarrow").type == fs.FileType.NotFound
report("pyarrow")
