"""Tensors of torch through the client and a real server: what is put comes back, in fewer bytes where the reader decodes."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import pytest
from engine_process import PYTHON, EngineProcess, needs_engines
from module_paths import ModulePaths
from server_process import MIB, REPOSITORY, BucketSetting, ServerProcess, ServerSettings

from kvobj.client import Credentials, KvClient
from kvobj.tensors.form import TensorForm
from kvobj.tensors.profiles import BlockBasis, Profile, object_key

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_engines()

VLLM: Final = ["layer", "kv", "token", "head", "dim"]
LMCACHE: Final = ["kv", "layer", "token", "head", "dim"]
SIZES: Final = (4, 2, 64)
TOKENS: Final = 64
CHUNK_BYTES: Final = 2 * 4 * 2 * 64 * TOKENS * 2
CODECS: Final = ("x3", "xa", "f8", "eq57", "eq55", "eq4", "eq3", "eq:200/1", "h4")


@pytest.fixture(scope="module")
def server(module_paths: ModulePaths) -> Iterator[ServerProcess]:
    buckets = (BucketSetting("cache", "kv", "memory"),)
    settings = ServerSettings(dram_bytes=160 * MIB, nvme_bytes=256 * MIB, buckets=buckets)
    with ServerProcess(module_paths.mktemp("tensors"), settings) as running:
        yield running


@pytest.fixture(scope="module")
def engine(server: ServerProcess, module_paths: ModulePaths) -> Iterator[EngineProcess]:
    log = module_paths.mktemp("tensors-engine") / "engine.log"
    with EngineProcess("tensors.py", log, {"PYTHONPATH": str(REPOSITORY)}) as running:
        keys = server.credentials()
        running.ask("use", endpoint=server.endpoint, access_key=keys.access_key, secret_key=keys.secret_key)
        yield running


@pytest.fixture(scope="module")
def codecs(engine: EngineProcess) -> list[str]:
    return list(engine.ask("usable"))


def forget_memory(server: ServerProcess) -> None:
    """A clean stop writes down what is in memory and forgets it."""
    assert server.terminate() == 0
    server.start()


@pytest.mark.parametrize("order", [None, VLLM, LMCACHE])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp32"])
def test_a_tensor_comes_back_bit_for_bit_in_the_order_that_is_declared(
    engine: EngineProcess, dtype: str, order: list[str] | None
) -> None:
    name = f"bits-{dtype}-{'-'.join(order or ['default'])}"
    engine.ask("declare", name=name, dtype=dtype, order=order)
    told = engine.ask("put", name=name, seed=1)
    assert (told["existed"], told["is_dense"]) == (False, order is None)
    found = engine.ask("get", name=name, seed=1)
    assert (found["same"], found["shape"]) == (True, told["shape"])
    assert engine.ask("get", name=name, seed=1, accept=["raw"], max_error=0.5)["same"]


@pytest.mark.parametrize(("kind", "sizes"), [("mla", (3, 1, 96)), ("k", (3, 2, 64)), ("v", (3, 2, 64))])
def test_latents_and_caches_of_keys_or_values_alone_have_one_on_the_axis_kv(
    engine: EngineProcess, kind: str, sizes: tuple[int, int, int]
) -> None:
    engine.ask("declare", name=f"kind-{kind}", kind=kind, sizes=sizes)
    told = engine.ask("put", name=f"kind-{kind}", seed=1)
    assert told["shape"] == [sizes[0], 1, sizes[1], TOKENS, sizes[2]]
    assert engine.ask("get", name=f"kind-{kind}", seed=1)["same"]


def test_a_chunk_of_fewer_tokens_and_a_range_of_layers_have_their_own_shapes(engine: EngineProcess) -> None:
    engine.ask("declare", name="parts", order=VLLM)
    engine.ask("put", name="parts", seed=1)
    assert engine.ask("put", name="parts", seed=2, tokens=17)["shape"] == [4, 2, 17, 2, 64]
    short = engine.ask("get", name="parts", seed=2, tokens=17)
    assert (short["same"], short["shape"]) == (True, [4, 2, 17, 2, 64])
    layers = engine.ask("get", name="parts", seed=1, layers=[1, 2])
    assert (layers["same"], layers["shape"]) == (True, [2, 2, 64, 2, 64])
    assert engine.ask("get", name="parts", seed=2, tokens=17, layers=[3, 3])["same"]
    assert engine.ask("get", name="parts", seed=9) is None
    assert engine.ask("get", name="parts", seed=9, accept="lossless first") is None


def test_another_shape_or_dtype_is_refused_before_anything_is_sent(engine: EngineProcess) -> None:
    engine.ask("declare", name="strict")
    whole = [4, 2, 2, 64, 64]
    for shape in ([4, 2, 64, 2, 64], [4, 2, 2, 65, 64], [4, 2, 2, 0, 64], whole[1:], [1, *whole], [2, 2, 4, 64, 64]):
        assert "not the shape of the namespace's chunks" in engine.ask("refused", name="strict", shape=shape), shape
    words = engine.ask("refused", name="strict", shape=whole, dtype="float16")
    assert words.startswith("InvalidRequestError: the namespace declares another dtype")
    assert "UnavailableError" in engine.ask("refused", name="strict", shape=whole)  # it fits: now the server is asked
    engine.ask("declare", name="opaque", kind="opaque")
    assert "no tensor layout" in engine.ask("refused", name="opaque", shape=whole)
    assert "KvClient.namespace(name)" in engine.ask("refused_name", name="strict")
    words = engine.ask("refused_kinds", name="strict")
    assert len(words) == 8
    assert all("torch.Tensor" in each for each in words[:4])
    assert all("accept" in each for each in words[4:])


def test_what_cannot_be_accepted_is_refused_by_name(engine: EngineProcess) -> None:
    engine.ask("declare", name="asked")
    engine.ask("put", name="asked", seed=1)
    assert "unknown tensor codec: 'zp'" in engine.ask("problem", name="asked", seed=1, accept=["zp", "raw"])
    assert engine.ask("get", name="asked", seed=1, accept=["ek"]) is None
    assert "none is named" in engine.ask("problem", name="asked", seed=1, accept=[])
    words = engine.ask("problem", name="asked", seed=1, accept=["x3"], layers=[0, 1])
    assert "a range of layers is read as it was put" in words
    assert engine.ask("problem", name="asked", seed=1, layers=[3, 9]).startswith("Invalid")
    assert engine.ask("get", name="asked", seed=1, accept=["ek", "raw"])["same"]


@pytest.mark.parametrize("order", ["transformers", "vllm", "lmcache"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_decodes_to_its_tensor_whole_and_by_layers(engine: EngineProcess, codec: str, order: str) -> None:
    for dtype, kind in product(("bf16", "fp16", "fp8_e4m3"), ("kv", "mla")):
        told = engine.ask("coded", codec=codec, dtype=dtype, order=order, kind=kind)
        if "refused" in told:
            assert codec not in {"x3", "xa"} or dtype.startswith("fp8")
            assert dtype != "bf16"
            continue
        assert told["shape"]
        assert told["layers"]
        if told["lossy"]:
            assert 0 < told["off"] <= told["bound"]
            assert told["bits"] < 9
        else:
            assert (told["same"], told["bound"]) == (True, 0.0)


def wire(told: dict[str, Any] | None) -> tuple[object, ...]:
    assert told is not None
    return told["same"], told["codec"], told["tier"], told["bound"]


def test_a_reader_that_decodes_gets_fewer_bytes_and_the_same_bits(
    engine: EngineProcess, server: ServerProcess, codecs: list[str]
) -> None:
    assert "xa" in codecs
    engine.ask("declare", name="coded", codecs={"nvme": "xa"}, order=VLLM)
    engine.ask("put", name="coded", seed=1)
    engine.ask("put", name="coded", seed=2, tokens=40)
    engine.ask("put", name="coded", seed=3)
    first = engine.ask("get", name="coded", seed=1, accept="lossless first")
    assert (*wire(first), first["wire_bytes"]) == (True, "raw", "dram", None, CHUNK_BYTES)
    forget_memory(server)
    told = engine.ask("get", name="coded", seed=1, accept="lossless first")
    assert wire(told) == (True, "xa", "nvme", None)
    assert told["wire_bytes"] < CHUNK_BYTES / 1.4
    short = engine.ask("get", name="coded", seed=2, tokens=40, accept=["xa"])
    assert wire(short) == (True, "xa", "nvme", None)
    assert engine.ask("get", name="coded", seed=1, accept=["x3"]) is None
    assert "of another chunk" in engine.ask("mistaken", name="coded", seed=1, other=3)
    awaited = engine.ask("get_awaited", name="coded", seed=1, other=4, accept=["xa", "raw"])
    assert awaited == {"same": True, "other": True, "stored": "raw"}
    assert engine.ask("get", name="coded", seed=1)["same"]


def test_a_lossy_copy_is_within_its_bound_for_who_takes_it_and_a_miss_for_who_does_not(
    engine: EngineProcess, server: ServerProcess, codecs: list[str]
) -> None:
    assert "eq4" in codecs
    engine.ask("declare", name="lossy", codecs={"nvme": "eq4"}, lossy=True)
    engine.ask("put", name="lossy", seed=1)
    engine.ask("put", name="lossy", seed=2, durability="local")
    assert wire(engine.ask("get", name="lossy", seed=1, accept=["eq4", "raw"])) == (True, "raw", "dram", None)
    forget_memory(server)
    assert engine.ask("get", name="lossy", seed=1) is None
    assert engine.ask("get", name="lossy", seed=1, accept="lossless first") is None
    frame = engine.ask("get", name="lossy", seed=1, accept=["eq4"])
    assert (frame["codec"], frame["tier"], frame["same"]) == ("eq4", "nvme", False)
    assert 0 < frame["off"] <= frame["bound"] < 1
    assert frame["wire_bytes"] < CHUNK_BYTES / 3
    bounded = engine.ask("get", name="lossy", seed=1, accept=["eq4"], max_error=frame["bound"])
    assert bounded == frame
    assert engine.ask("get", name="lossy", seed=1, accept=["eq4"], max_error=0.9 * frame["bound"]) is None
    plain = engine.ask("get", name="lossy", seed=1, accept=["raw"], max_error=frame["bound"])
    assert (plain["codec"], plain["wire_bytes"], plain["bound"]) == ("raw", CHUNK_BYTES, frame["bound"])
    assert (plain["sum"], plain["off"]) == (frame["sum"], frame["off"])  # the server decodes to what we do
    assert engine.ask("get", name="lossy", seed=2)["same"]  # class local promises bytes


def test_a_frame_that_names_a_profile_is_decoded_with_that_of_the_bucket(
    engine: EngineProcess, server: ServerProcess
) -> None:
    columns = SIZES[1] * SIZES[2]
    basis = [1.0 if row == column else 0.0 for row in range(columns) for column in range(columns)]
    form = TensorForm("kv", "bf16", *SIZES, 1)
    profile = Profile.build(form, [BlockBasis(1.0, [0.0] * columns, basis)] * form.blocks, None)
    keys = server.credentials()
    with KvClient(server.endpoint, Credentials(keys.access_key, keys.secret_key), "cache", same_host=False) as client:
        client.put_chunk(object_key(profile.digest), profile.data, durability="local")
    engine.ask("declare", name="profiled", codecs={"nvme": "ek"}, lossy=True, profile=profile.digest.hex())
    engine.ask("put", name="profiled", seed=1)
    forget_memory(server)
    frame = engine.ask("get", name="profiled", seed=1, accept=["ek"])
    assert (frame["codec"], frame["tier"], frame["same"]) == ("ek", "nvme", False)
    assert 0 < frame["off"] <= frame["bound"] < 1
    plain = engine.ask("get", name="profiled", seed=1, accept=["raw"], max_error=frame["bound"])
    assert (plain["codec"], plain["sum"], plain["off"]) == ("raw", frame["sum"], frame["off"])
    beside = engine.ask("get_beside", name="profiled", seed=1, accept=["ek"], seconds=5)
    assert (beside["found"], beside["is_held"]) == ([True, True], True), (
        "who reads waits for nobody's read of a profile"
    )
    first, second = beside["seconds"]
    assert 0 < second <= 5 < first, "a read of a profile has what is left of its call's time, and the profile is kept"


def test_the_clients_page_is_right_about_tensors(server: ServerProcess) -> None:
    page = (REPOSITORY / "docs" / "client.md").read_text(encoding="utf-8")
    before, _, after = page.partition("\n## Tensors\n")
    block = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    examples = block.findall(after.partition("\n## ")[0])
    assert len(examples) == 2
    said = re.findall(r"print\(.*\)  # (.*)$", "\n".join(examples), re.MULTILINE)
    program = "\n".join([block.findall(before)[0], *examples]).replace("http://127.0.0.1:9000", server.endpoint)
    keys = server.credentials()
    names = {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}
    environment = {**os.environ, **names, "PYTHONPATH": str(REPOSITORY)}
    command = [str(PYTHON), "-W", "error", "-c", program]
    for _ in range(2):  # whoever tries the page runs it again
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[1:] == said  # the first line is of the page's first example
