"""OpenDAL: one operator over many kinds of storage; here its S3 service, with conditions and parts."""

from __future__ import annotations

import opendal
from given import MIB, NAMES, SIZES, body_of, given, refused, report, same

place = given()
operator = opendal.Operator(
    "s3",
    bucket=place.bucket,
    root=f"/{place.prefix}/",
    endpoint=place.endpoint,
    region=place.region,
    access_key_id=place.access_key,
    secret_access_key=place.secret_key,
    enable_virtual_host_style=str(place.is_virtual_hosted).lower(),
    disable_config_load="true",
    disable_ec2_metadata="true",
)
for seed, name in enumerate(NAMES):
    body = body_of(SIZES[seed % len(SIZES)], seed)
    operator.write(name, body, content_type="text/plain", user_metadata={"number": str(seed)})
    same(operator.read(name), body)
    found = operator.stat(name)
    assert (found.content_length, found.content_type) == (len(body), "text/plain")
listed = {entry.path for entry in operator.scan("")} - {"/"}
assert {path for path in listed if not path.endswith("/")} == set(NAMES), listed

body = body_of(11 * MIB + 77, 7)
operator.write("large", body, chunk=5 * MIB, concurrent=2)
same(operator.read("large"), body)
same(operator.read("large", offset=MIB, size=100), body[MIB : MIB + 100])
with operator.open("large", "rb") as file:
    file.seek(5 * MIB - 10)
    same(file.read(10) + file.read(10), body[5 * MIB - 10 : 5 * MIB + 10])  # it may give less than is asked for
operator.write("once", b"first", if_not_exists=True)
with refused(opendal.exceptions.ConditionNotMatch):
    operator.write("once", b"second", if_not_exists=True)
same(operator.read("once"), b"first")
operator.copy("large", "copied ü")
same(operator.read("copied ü"), body)
assert operator.exists("copied ü")
assert not operator.exists("absent")
operator.remove_all("")
assert [entry.path for entry in operator.scan("") if not entry.path.endswith("/")] == []
report("opendal")
