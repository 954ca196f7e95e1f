"""Chunks as torch tensors: what a namespace declares says their shape, so a name is all that a reader needs.

    chunks = TensorChunks(client, client.declare_namespace("llama8b", declaration))
    chunks.put(chunk_id, kv, parent=ROOT)                      # kv: bfloat16, axes as declared
    same = chunks.get(chunk_id)                                # None: not stored
    near = chunks.get(chunk_id, accept=("eq4",), max_error=0.07)

Imports torch, and nothing of the server. Frames that the store holds are decoded here where `accept` says so: fewer bytes cross the
wire, and the server's processors do nothing. For asyncio: `kvobj.client.aio.tensors`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from kvobj.client.call_scope import bounded_seconds
from kvobj.client.kv import KvClient
from kvobj.client.kv_values import RAW, Name, Namespace, StoredBytes, StoredChunk, accepted, check_namespace
from kvobj.errors import CorruptionError, InvalidRequestError, UnavailableError
from kvobj.tensors.codecs import LOSSLESS, parse_tensor_frame, unavailable
from kvobj.tensors.form import TensorForm
from kvobj.tensors.frame import FINGERPRINT_BYTES, TensorFrame
from kvobj.tensors.profiles import Profile, object_key, parse_named
from kvobj.tensors.torch_tensors import TORCH_DTYPES, bytes_of, decode_tensor, tensor_of

LOSSLESS_FIRST: Final = (*sorted(LOSSLESS), RAW)
"""`accept` of a reader that decodes for itself what is stored without loss."""


class TensorChunks:
    """The chunks of one namespace as tensors. Thread-safe as its client, which stays the caller's.

    `InvalidRequestError` for a namespace whose layout is opaque, or that a list of namespaces told without its declaration.
    """

    def __init__(self, client: KvClient, namespace: Namespace) -> None:
        layout = check_namespace(namespace).declaration.get("layout")
        form = TensorForm.from_layout(layout, namespace.chunk_tokens) if isinstance(layout, dict) else None
        if form is None:
            raise InvalidRequestError("the namespace declares no tensor layout", namespace=namespace.name)
        self._client = client
        self._namespace = namespace
        self._tokens_axis = form.order.index("token")
        self.form = form
        """Of a full chunk."""
        self._profile: Profile | None = None

    def put(
        self,
        name: Name,
        tensor: torch.Tensor,
        *,
        parent: Name | None = None,
        durability: str | None = None,
    ) -> StoredChunk:
        """Store a tensor whose axes are in the declared order: of a full chunk, or of fewer tokens.

        Dense host memory is sent as it lies, and must not change meanwhile; anything else, what lies on a GPU too, is copied
        first. `InvalidRequestError` for another shape or dtype, and `TypeError` for what is no tensor, before anything is sent;
        else as `KvClient.put_chunk`.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a chunk is a torch.Tensor here, and not a {type(tensor).__name__}")
        shape = tuple(tensor.shape)
        form = None if len(shape) != len(self.form.shape) else self._form_of_tokens(shape[self._tokens_axis])
        if form is None or form.shape != shape:
            raise InvalidRequestError("not the shape of the namespace's chunks", shape=shape, want=self.form.shape)
        if tensor.dtype is not TORCH_DTYPES[form.dtype]:
            raise InvalidRequestError("the namespace declares another dtype", dtype=str(tensor.dtype), want=form.dtype)
        tokens = None if form.tokens == self.form.tokens else form.tokens
        return self._client.put_chunk(
            name, bytes_of(tensor), namespace=self._namespace, parent=parent, tokens=tokens, durability=durability
        )

    def get(
        self,
        name: Name,
        *,
        accept: Sequence[str] = (RAW,),
        max_error: float | None = None,
        layers: tuple[int, int] | None = None,
        pin: bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> torch.Tensor | None:
        """A chunk as a tensor in host memory of its own, axes in the declared order; None if it is not stored in a form that
        will do.

        By default exactly what was put. `accept` names codecs that may come as they are stored and are decoded here
        (`LOSSLESS_FIRST`, or lossy ones, then with `max_error`, the largest error of any value): see `KvClient.get_stored`. Those
        without kernels here are left out; `UnavailableError` where none is left. `layers` A to B, both included, of a layout that
        puts layers first: exactly what was put, so with no other `accept`. A profile that a frame names is read from the bucket,
        within the same timeout, and kept. `InvalidRequestError`; `CorruptionError`. What this gives is what `KvClient.match` finds
        with the same `accept` and `max_error`.
        """
        items = accepted(accept, max_error)
        if items == [RAW]:
            found = self._client.get_chunk(
                name, namespace=self._namespace, layers=layers, pin=pin, timeout_seconds=timeout_seconds
            )
            return None if found is None else self._tensor(found, layers)
        if layers is not None:
            raise InvalidRequestError("a range of layers is read as it was put", accept=tuple(items))
        seconds = self._client.timeout_seconds if timeout_seconds is None else bounded_seconds(timeout_seconds)
        deadline = time.monotonic() + seconds
        stored = self._client.get_stored(
            name,
            namespace=self._namespace,
            accept=_usable(items),
            pin=pin,
            timeout_seconds=seconds,
        )
        return None if stored is None else self._decoded(stored, deadline)

    def _decoded(self, stored: StoredBytes, deadline: float) -> torch.Tensor:
        if stored.codec == RAW:
            return self._tensor(stored.data, None)
        head = parse_tensor_frame(stored.data, len(stored.data))
        self._check(head, stored)
        return decode_tensor(stored.data, head=head, profile=self._profile_of(head, deadline))

    def _profile_of(self, head: TensorFrame, deadline: float) -> Profile | None:
        """The profile that the frame names, read from its namespace's bucket unless it is the one that is kept; None where it names
        none. Threads that find none kept read it each for itself: none waits for what another is told, or is not."""
        digest = head.profile_digest
        if digest is None:
            return None
        kept = self._profile
        if kept is not None and kept.digest == digest:
            return kept
        left = max(0.0, deadline - time.monotonic())
        found = self._client.get_chunk(object_key(digest), timeout_seconds=left)
        if found is None:
            raise UnavailableError("the bucket has no such profile", key=object_key(digest))
        read = self._profile = parse_named(bytes(found), digest)
        return read

    def _check(self, head: TensorFrame, stored: StoredBytes) -> None:
        """That the frame is this chunk's: before any memory is taken by what it says of itself."""
        is_ours = (
            head.form == self._form_of_tokens(head.form.tokens)
            and head.fingerprint == self._namespace.fingerprint[:FINGERPRINT_BYTES]
            and stored.plain_digest in {None, head.digest}
        )
        if not is_ours:
            raise CorruptionError("the frame that came is of another chunk", codec=head.codec)

    def _tensor(self, plain: memoryview, layers: tuple[int, int] | None) -> torch.Tensor:
        form = self.form if layers is None else self.form.layers_only(range(layers[0], layers[1] + 1))
        tokens, rest = divmod(len(plain) * form.tokens, form.plain_bytes)
        if rest or not 1 <= tokens <= form.tokens:
            raise CorruptionError("the chunk's size is not that of its namespace", size_bytes=len(plain))
        return tensor_of(plain, replace(form, tokens=tokens))

    def _form_of_tokens(self, tokens: int) -> TensorForm | None:
        return replace(self.form, tokens=tokens) if 1 <= tokens <= self.form.tokens else None


def _usable(items: Sequence[str]) -> list[str]:
    """What can be decoded here of what is accepted (`kv_values.accepted`)."""
    problems: dict[str, str] = {}
    for item in items:
        codec = item.partition(";")[0]
        if codec == RAW:
            continue
        try:
            problem = unavailable(codec)
        except ValueError as error:
            raise InvalidRequestError(f"accept: {error}", codec=codec) from error
        if problem is not None:
            problems[codec] = problem
    usable = [item for item in items if item.partition(";")[0] not in problems]
    if not usable:
        raise UnavailableError(f"no codec that is accepted can be used here: {problems or 'none is named'}")
    return usable
