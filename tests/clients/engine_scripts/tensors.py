"""`kvobj.client.tensors` in a process with torch: tensors put and read back, frames coded and decoded, and what is refused.

Run in `.envs/engines` with kvobj's source tree on PYTHONPATH; see `command_lines` for how. Tensors come from a seed and stay here:
the test is told whether bits are the same, how far off values are, and in which form a chunk came over the wire.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from command_lines import serve

from kvobj.client import ROOT, Credentials, KvClient, Namespace, StoredBytes
from kvobj.client.aio import AsyncKvClient
from kvobj.client.aio.tensors import AsyncTensorChunks
from kvobj.client.tensors import LOSSLESS_FIRST, TensorChunks
from kvobj.errors import KvobjError
from kvobj.tensors.codecs import is_lossy, parse_tensor_frame, refusal, unavailable
from kvobj.tensors.form import AXES, Dtype, Kind
from kvobj.tensors.torch_tensors import ENGINE_ORDERS, TORCH_DTYPES, decode_tensor, encode_tensor, form_of

torch.set_num_threads(1)
BUCKET: Final = "cache"
settings: dict[str, str] = {}
namespaces: dict[str, Namespace] = {}
tensors: dict[tuple[str, int, int], torch.Tensor] = {}
CODECS: Final = ("x3", "xa", "f8", "eq57", "eq55", "eq4", "eq3", "eq:200/1", "h4")


class Watched(KvClient):
    """A client that notes what came of each chunk that was asked for as it is stored."""

    def __init__(self) -> None:
        super().__init__(settings["endpoint"], _keys(), BUCKET, same_host=False)
        self.came: list[StoredBytes] = []

    def get_stored(self, *arguments: Any, **named: Any) -> StoredBytes | None:  # noqa: ANN401 - handed on
        """See `KvClient`."""
        stored = super().get_stored(*arguments, **named)
        if stored is not None:
            self.came.append(stored)
        return stored


def _keys() -> Credentials:
    return Credentials(settings["access_key"], settings["secret_key"])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes: NaNs are equal, and so are the zeros of either sign only to themselves."""
    return tensor.contiguous().view(torch.uint8)


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Values as K and V have them."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(dtype)


def use(**fields: str) -> None:
    """Where the server is."""
    settings.update(fields)


def declare(
    *,
    name: str,
    dtype: str = "bf16",
    kind: str = "kv",
    order: list[str] | None = None,
    sizes: tuple[int, int, int] = (4, 2, 64),
    chunk_tokens: int = 64,
    **more: Any,  # noqa: ANN401 - of the declaration
) -> None:
    """A namespace with this layout; sizes are layers, heads, dimensions of a head."""
    layers, heads, head_dim = sizes
    layout: dict[str, Any] = {"kind": kind}
    if kind != "opaque":
        layout |= {"dtype": dtype, "layers": layers, "kv_heads": heads, "head_dim": head_dim}
    if order is not None:
        layout["order"] = order
    document = {"model": "m", "chunk_tokens": chunk_tokens, "ids": "kvobj", "layout": layout, **more}
    with Watched() as client:
        namespaces[name] = client.declare_namespace(name, document)


def _name(namespace: Namespace, seed: int, tokens: int) -> bytes:
    (name,) = namespace.chunk_ids([seed] * tokens, partial_last=True)
    return name


def put(*, name: str, seed: int, tokens: int | None = None, durability: str | None = None) -> dict[str, Any]:
    """Put a tensor of this seed, in memory that is not dense: axes are turned from the default order."""
    with Watched() as client:
        namespace = namespaces[name]
        chunks = TensorChunks(client, namespace)
        form, count = chunks.form, tokens or namespace.chunk_tokens
        sizes = form.sizes | {"token": count}
        default = made(tuple(sizes[axis] for axis in AXES), TORCH_DTYPES[form.dtype], seed)
        tensor = default.permute([AXES.index(axis) for axis in form.order])
        tensors[name, seed, count] = tensor
        stored = chunks.put(_name(namespace, seed, count), tensor, parent=ROOT, durability=durability)
        return {"existed": stored.existed, "shape": list(tensor.shape), "is_dense": tensor.is_contiguous()}


def get(*, name: str, seed: int, tokens: int | None = None, **asked: Any) -> dict[str, Any] | None:  # noqa: ANN401 - of `get`
    """Read it back: whether its bits are those that were put, how far off values are, what came over the wire."""
    with Watched() as client:
        namespace = namespaces[name]
        count = tokens or namespace.chunk_tokens
        if asked.get("accept") == "lossless first":
            asked["accept"] = LOSSLESS_FIRST
        tensor = TensorChunks(client, namespace).get(_name(namespace, seed, count), **asked)
        return None if tensor is None else _told(tensor, _expected(name, seed, count, asked), client.came)


def _expected(name: str, seed: int, count: int, asked: dict[str, Any]) -> torch.Tensor:
    whole = tensors[name, seed, count]
    if "layers" not in asked:
        return whole
    first, last = asked["layers"]
    return whole[first : last + 1]


def _told(tensor: torch.Tensor, expected: torch.Tensor, came: list[StoredBytes]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "same": tensor.dtype is expected.dtype and torch.equal(bits(tensor), bits(expected)),
        "shape": list(tensor.shape),
        "off": float((tensor.float() - expected.float()).abs().max()),
        "sum": float(tensor.double().sum()),
    }
    if came:
        (stored,) = came
        bound = None if stored.lossy is None else float(stored.lossy.partition("max-error=")[2])
        told |= {"codec": stored.codec, "wire_bytes": len(stored.data), "tier": stored.tier, "bound": bound}
    return told


def get_awaited(*, name: str, seed: int, other: int, **asked: Any) -> dict[str, Any]:  # noqa: ANN401 - of `get`
    """The same by the twin for asyncio, which puts another tensor of as many tokens first and reads that, too."""

    async def both() -> dict[str, Any]:
        async with AsyncKvClient(settings["endpoint"], _keys(), BUCKET, same_host=False) as client:
            namespace = await client.namespace(name)
            chunks = AsyncTensorChunks(client, namespace)
            count = namespace.chunk_tokens
            another = made(chunks.form.shape, TORCH_DTYPES[chunks.form.dtype], other)
            await chunks.put(_name(namespace, other, count), another, parent=ROOT)
            one, two = await asyncio.gather(
                chunks.get(_name(namespace, seed, count), **asked), chunks.get(_name(namespace, other, count))
            )
            stored = await client.get_stored(_name(namespace, seed, count), namespace=namespace, accept=["raw"])
            assert one is not None
            assert two is not None
            assert stored is not None
            return {
                "same": torch.equal(bits(one), bits(tensors[name, seed, count])),
                "other": torch.equal(bits(two), bits(another)),
                "stored": stored.codec,
            }

    return asyncio.run(both())


class Holding(KvClient):
    """A client whose first read of a chunk by itself is held until `may_read`; notes how long each may take."""

    def __init__(self) -> None:
        super().__init__(settings["endpoint"], _keys(), BUCKET, same_host=False)
        self.may_read = threading.Event()
        self.is_held = threading.Event()
        self.seconds: list[float | None] = []

    def get_chunk(self, *arguments: Any, **named: Any) -> memoryview | None:  # noqa: ANN401 - handed on
        """See `KvClient`."""
        self.seconds.append(named.get("timeout_seconds"))
        if not self.is_held.is_set():
            self.is_held.set()
            self.may_read.wait(10)
        return super().get_chunk(*arguments, **named)


def get_beside(*, name: str, seed: int, accept: list[str], seconds: float) -> dict[str, Any]:
    """Read a frame that names a profile, twice, while another thread's read of the profile is held: whether it is held still, and
    how long the reads of the profile might have taken."""
    namespace = namespaces[name]
    wanted = _name(namespace, seed, namespace.chunk_tokens)
    with Holding() as client:
        chunks = TensorChunks(client, namespace)
        other = threading.Thread(target=chunks.get, args=(wanted,), kwargs={"accept": accept})
        other.start()
        assert client.is_held.wait(10)
        found = [chunks.get(wanted, accept=accept, timeout_seconds=seconds) for _ in range(2)]
        is_held = not client.may_read.is_set() and other.is_alive()
        client.may_read.set()
        other.join()
        return {"found": [each is not None for each in found], "is_held": is_held, "seconds": client.seconds}


def refused_name(*, name: str) -> str:
    """With what words a namespace's name in the place of the namespace is refused."""
    named: Any = name
    with Watched() as client:
        try:
            TensorChunks(client, named)
        except TypeError as error:
            return str(error)
    raise AssertionError("it was not refused")


def refused_kinds(*, name: str) -> list[str]:
    """With what words what is no tensor, and what is no list of codecs, is refused: the server is not asked at all."""
    tensors: tuple[Any, ...] = (None, 5, [[1.0]], b"bytes")
    accepts: tuple[Any, ...] = ("raw", b"raw", [None], ["raw, x3"])
    words = []
    with KvClient("http://127.0.0.1:1", _keys(), BUCKET, timeout_seconds=0.2) as client:
        chunks = TensorChunks(client, namespaces[name])
        calls: list[Callable[[], object]] = [partial(chunks.put, bytes(32), each, parent=ROOT) for each in tensors]
        calls += [partial(chunks.get, bytes(32), accept=each) for each in accepts]
        for call in calls:
            try:
                call()
            except TypeError as error:
                words.append(str(error))
    return words


def refused(*, name: str, shape: list[int], dtype: str = "bfloat16") -> str:
    """With what words a tensor is refused, and that nothing was sent: the server is not asked at all."""
    client = KvClient("http://127.0.0.1:1", _keys(), BUCKET, timeout_seconds=0.2)
    with client:
        try:
            TensorChunks(client, namespaces[name]).put(
                bytes(32), torch.zeros(shape, dtype=getattr(torch, dtype)), parent=ROOT
            )
        except KvobjError as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


def problem(*, name: str, seed: int, **asked: Any) -> str:  # noqa: ANN401 - of `get`
    """With what words a read is refused."""
    try:
        get(name=name, seed=seed, **asked)
    except KvobjError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it was not refused")


def mistaken(*, name: str, seed: int, other: int) -> str:
    """What a reader says who gets the frame of another chunk."""
    namespace = namespaces[name]
    count = namespace.chunk_tokens
    with Watched() as client:
        wrong = client.get_stored(_name(namespace, other, count), namespace=namespace, accept=["xa"])
        right = client.get_stored(_name(namespace, seed, count), namespace=namespace, accept=["xa"])
        assert wrong is not None
        assert right is not None
        mixed = StoredBytes(wrong.data, wrong.codec, None, right.digest, wrong.tier)
        client.get_stored = lambda *_, **__: mixed  # type: ignore[method-assign]
        try:
            TensorChunks(client, namespace).get(_name(namespace, seed, count), accept=LOSSLESS_FIRST)
        except KvobjError as error:
            return f"{type(error).__name__}: {error}"
    raise AssertionError("it was taken")


def coded(*, codec: str, dtype: Dtype, order: str, kind: Kind = "kv") -> dict[str, Any]:
    """A tensor through its frame, whole and by layers."""
    axes = ENGINE_ORDERS[order]
    sizes = {"layer": 5, "kv": 2 if kind == "kv" else 1, "head": 1 if kind == "mla" else 3, "token": 48, "dim": 64}
    tensor = made(tuple(sizes[axis] for axis in axes), TORCH_DTYPES[dtype], 3)
    form = form_of(tensor, kind=kind, order=axes)
    why = refusal(codec, form)
    if why is not None:
        return {"refused": why}
    frame = encode_tensor(tensor, codec, kind=kind, order=axes, fingerprint=b"f" * 16)
    head = parse_tensor_frame(frame, len(frame))
    whole = decode_tensor(frame)
    at = axes.index("layer")
    parts = [decode_tensor(bytes(frame), layers=range(first, last)) for first, last in ((0, 2), (2, 5), (4, 5))]
    return {
        "lossy": is_lossy(codec),
        "same": torch.equal(bits(whole), bits(tensor)),
        "shape": tuple(whole.shape) == tuple(tensor.shape) and whole.dtype is tensor.dtype,
        "layers": torch.equal(bits(torch.cat(parts[:2], at)), bits(whole))
        and torch.equal(bits(parts[2]), bits(whole.narrow(at, 4, 1))),
        "off": float((whole.float() - tensor.float()).abs().max()),
        "bound": head.certificate.max_error,
        "bits": 8 * len(frame) / tensor.numel(),
    }


def usable() -> list[str]:
    """The codecs that this machine can use, of those that are tried."""
    return [codec for codec in CODECS if unavailable(codec) is None]


if __name__ == "__main__":
    serve(
        {
            each.__name__: each
            for each in (
                use,
                declare,
                put,
                get,
                get_awaited,
                get_beside,
                refused,
                refused_kinds,
                refused_name,
                problem,
                mistaken,
                coded,
                usable,
            )
        }
    )
