"""s3fs: files of a bucket through fsspec, written whole, in parts, appended to, merged, moved."""

from __future__ import annotations

import s3fs
from given import MIB, NAMES, SIZES, body_of, fetch, given, refused, report, same
from s3fs.utils import FileExpired

PART_BYTES = 5 * MIB

place = given()
root = f"{place.bucket}/{place.prefix}"
style = "virtual" if place.is_virtual_hosted else "path"
files = s3fs.S3FileSystem(
    key=place.access_key,
    secret=place.secret_key,
    endpoint_url=place.endpoint,
    client_kwargs={"region_name": place.region},
    config_kwargs={"s3": {"addressing_style": style}, "signature_version": "s3v4"},
    skip_instance_cache=True,
)

# whole objects, with awkward names and sizes
for seed, name in enumerate(NAMES):
    body = body_of(SIZES[seed % len(SIZES)], seed)
    files.pipe_file(f"{root}/names/{name}", body)
    same(files.cat_file(f"{root}/names/{name}"), body)
assert sorted(files.find(f"{root}/names")) == sorted(f"{root}/names/{name}" for name in NAMES)
assert files.info(f"{root}/names/{NAMES[2]}")["size"] == SIZES[2]

# in parts, read at random, appended to by copying what is there
body = body_of(2 * PART_BYTES + 77, 7)
with files.open(f"{root}/large", "wb", block_size=PART_BYTES, Metadata={"colour": "blue"}) as stream:
    for start in range(0, len(body), MIB):
        stream.write(body[start : start + MIB])
assert files.metadata(f"{root}/large") == {"colour": "blue"}
with files.open(f"{root}/large", "rb", block_size=MIB) as stream:
    stream.seek(PART_BYTES - 5)
    same(stream.read(10), body[PART_BYTES - 5 : PART_BYTES + 5])
    stream.seek(-20, 2)
    same(stream.read(), body[-20:])
same(files.cat_file(f"{root}/large", start=-9), body[-9:])
with files.open(f"{root}/large", "ab", block_size=PART_BYTES) as stream:
    stream.write(b"and more")
same(files.cat_file(f"{root}/large"), body + b"and more")
files.merge(f"{root}/merged", [f"{root}/large", f"{root}/names/{NAMES[2]}"])
same(files.cat_file(f"{root}/merged"), body + b"and more" + body_of(SIZES[2], 2))

# many at once, pieces of many, listings
small = {f"{root}/tree/{number % 3}/{number}": body_of(100 + number, number) for number in range(24)}
files.pipe(small)
assert files.cat(list(small)) == small
assert files.cat_ranges(list(small), 3, 50) == [data[3:50] for data in small.values()]
assert sorted(files.ls(f"{root}/tree", detail=False)) == [f"{root}/tree/{number}" for number in range(3)]
assert len(files.glob(f"{root}/tree/1/*")) == 8
assert files.du(f"{root}/tree") == sum(map(len, small.values()))
assert files.isdir(f"{root}/tree")
assert not files.exists(f"{root}/absent")

# copies and moves, times, exclusive creation
files.cp_file(f"{root}/large", f"{root}/copied")
files.mv(f"{root}/copied", f"{root}/moved")
same(files.cat_file(f"{root}/moved"), body + b"and more")
assert not files.exists(f"{root}/copied")
files.setxattr(f"{root}/moved", copy_kwargs={"ContentType": "text/plain"}, colour="red")
assert files.getxattr(f"{root}/moved", "colour") == "red"
files.touch(f"{root}/moved", truncate=True)
assert files.info(f"{root}/moved")["size"] == 0
with files.open(f"{root}/exclusive", "xb") as stream:
    stream.write(b"first")
with refused(OSError) as caught, files.open(f"{root}/exclusive", "xb") as stream:
    stream.write(b"second")
assert "pre-conditions" in str(caught[0])
same(files.cat_file(f"{root}/exclusive"), b"first")
with files.open(f"{root}/exclusive", "rb", block_size=1) as stream:  # it knows the failed If-Match by S3's own words
    files.pipe_file(f"{root}/exclusive", b"other")
    with refused(FileExpired):
        stream.read()

# presigned, and gone
assert fetch(files.sign(f"{root}/large", expiration=60)) == (200, body + b"and more")
with refused(FileNotFoundError):
    files.cat_file(f"{root}/absent")
files.rm(root, recursive=True)
files.invalidate_cache()
assert files.find(root) == []
files.mkdir("made-by-s3fs")
assert "made-by-s3fs" in files.ls("")
files.rmdir("made-by-s3fs")
report("s3fs", "fsspec", "aiobotocore")
