"""TensorStore: an array in chunks, each an object that is replaced only over the one that was read."""

from __future__ import annotations

import numpy as np
import tensorstore as ts
from given import given, report

place = given()
where = {
    "driver": "s3",
    "bucket": place.bucket,
    "endpoint": place.endpoint,
    "aws_region": place.region,
    "path": f"{place.prefix}/array/",
}
store = ts.open(
    {"driver": "zarr3", "kvstore": where},
    create=True,
    dtype=ts.uint16,
    shape=[300, 500],
    chunk_layout=ts.ChunkLayout(chunk_shape=[100, 100]),
).result()
values = np.random.default_rng(1).integers(0, 2**16, (300, 500), np.uint16)
store.write(values).result()
again = ts.open({"driver": "zarr3", "kvstore": where}, open=True).result()
assert np.array_equal(again.read().result(), values)
assert np.array_equal(again[95:105, 250:260].read().result(), values[95:105, 250:260])
again[90:110, :7].write(np.zeros((20, 7), np.uint16)).result()
values[90:110, :7] = 0
assert np.array_equal(ts.open({"driver": "zarr3", "kvstore": where}, open=True).result().read().result(), values)

pairs = ts.KvStore.open(where).result()
first = pairs.write("once", b"first").result()
pairs.write("once", b"second", if_equal=first.generation).result()
assert pairs["once"] == b"second"
pairs.write("once", b"third", if_equal=first.generation).result()  # a write that does not take place
assert pairs["once"] == b"second"
assert len(pairs.list().result()) == 17, pairs.list().result()
pairs.delete_range(ts.KvStore.KeyRange()).result()
assert pairs.list().result() == []
report("tensorstore")
