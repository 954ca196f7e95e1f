"""What a namespace declares (`kv-api` §3): parsed strictly, completed with its defaults, made canonical. Pure.

Identity is all that makes bytes of two chunks differ, or that a server must know to name and check them: model, layout, chunk
length, rank, adapter, RoPE, salt, the axis of parts, and how ids are made. Settings (codecs, lossy, access, quota, profile) are
beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvobj.catalog.namespace_protocol import NamespaceRow
from kvobj.catalog.rows import NamespaceQuota
from kvobj.errors import InvalidRequestError
from kvobj.ids.canonical_json import canonical_json
from kvobj.ids.chunk_ids import fingerprint

CHUNK_BYTES_MAX: Final = 5 * 2**30
"""As one PUT may carry."""

_DTYPE_BYTES: Final = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip
_AXES: Final = ("layer", "kv", "head", "token", "dim")
_TENSOR_CODECS: Final = frozenset({"x3", "xa", "f8", "eq57", "eq55", "eq4", "eq3", "ek", "h4"})
_LOSSY_CODECS: Final = _TENSOR_CODECS - {"x3", "xa"}
_PROFILED_CODECS: Final = frozenset({"ek"})
_DEVICE_CODECS: Final = ("raw", "x3", "xa")
"""What lies in device memory: what was put, encoded and decoded there."""
_ADAPTERLESS: Final = ("vllm-sha256-cbor", "sglang-sha256")
_PATH: Final = re.compile(r"at (`key` in )?`\$\.?(.*?)`")
_UNKNOWN: Final = re.compile(r"unknown field `(.*?)`")

_Text = Annotated[str, Meta(min_length=1, max_length=1024)]
_Count = Annotated[int, Meta(ge=1, le=2**20)]
_Bound = Annotated[int, Meta(ge=0, le=2**53 - 1)]
_Rank = tuple[Annotated[int, Meta(ge=0, le=2**20)], _Count]
_Level = Literal["read", "write"]
_Tier = Literal["hbm", "dram", "nvme", "remote"]
_Codec = Literal["raw", "zp", "x3", "xa", "f8", "eq57", "eq55", "eq4", "eq3", "ek", "h4"]
_Kind = Literal["kv", "k", "v", "mla", "opaque"]
_Dtype = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "uint8"]
_Axis = Literal["layer", "kv", "head", "token", "dim"]
_Ids = Literal["kvobj", "foreign", "lmcache", "vllm-sha256-cbor", "sglang-sha256"]
_PartAxis = Literal["layer", "kv", "rank"]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Common to all that is parsed: no other fields than those named."""


class Layout(_Part, frozen=True):
    """How a chunk's bytes are ordered. `mla`: `head_dim` is the latent width and `kv_heads` 1. `opaque`: bytes as given.

    Layers and heads are those that one chunk holds: of a rank's share where the namespace is a rank's.
    """

    kind: _Kind
    dtype: _Dtype | None = None
    layers: _Count | None = None
    kv_heads: _Count | None = None
    head_dim: _Count | None = None
    order: tuple[_Axis, ...] | None = None


class Rank(_Part, frozen=True):
    """Which share of the model the chunks hold: [index, count] each."""

    tensor: _Rank = (0, 1)
    pipeline: _Rank = (0, 1)


class Rope(_Part, frozen=True):
    """Rotary position embedding. `applied`: keys are stored after it. `scaling`: what the engine was told besides."""

    theta: Annotated[float, Meta(gt=0)]
    applied: bool = True
    scaling: Annotated[dict[_Text, float | str | bool], Meta(max_length=16)] | None = None


class _Quota(_Part, frozen=True):
    chunks: _Bound | None = None
    size_bytes: _Bound | None = None


class _Document(_Part, frozen=True, kw_only=True):
    """A declaration as a request has it."""

    model: _Text
    chunk_tokens: _Count
    layout: Layout
    ids: _Ids
    revision: _Text | None = None
    tokenizer: _Text | None = None
    rank: Rank = Rank()
    adapter: _Text | None = None
    rope: Rope | None = None
    salt: Annotated[str, Meta(max_length=1024)] = ""
    part_axis: _PartAxis | None = None
    codecs: dict[_Tier, _Codec] | UnsetType | None = UNSET
    lossy: bool | UnsetType | None = UNSET
    access: Annotated[dict[_Text, _Level], Meta(max_length=4096)] | UnsetType | None = UNSET
    quota: _Quota | UnsetType | None = UNSET
    profile: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | UnsetType | None = UNSET


_NO_CHOICE: Final = re.compile(r"Invalid enum value (.*)")
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "ids": get_args(_Ids),
    "layout.kind": get_args(_Kind),
    "layout.dtype": get_args(_Dtype),
    "layout.order[...]": get_args(_Axis),
    "part_axis": get_args(_PartAxis),
    "codecs (key)": get_args(_Tier),
    "codecs[...]": get_args(_Codec),
    "access[...]": get_args(_Level),
}
"""What may stand in the fields that have a choice, by their names; `(key)`: as a name in a table."""


@dataclass(frozen=True, slots=True)
class NamespaceSettings:
    """Settings that a request names; None: not named, left as they are."""

    codecs: dict[str, str] | None = None
    lossy: bool | None = None
    access: dict[str, str] | None = None
    quota: NamespaceQuota | None = None
    profile: bytes | None = None

    def over(self, row: NamespaceRow) -> NamespaceRow:
        """The row with these settings in place of its own. `InvalidRequestError` where they do not fit it or each other."""
        changed = msgspec.structs.replace(
            row,
            codecs=row.codecs if self.codecs is None else self.codecs,
            lossy=row.lossy if self.lossy is None else self.lossy,
            access=row.access if self.access is None else self.access,
            quota=row.quota if self.quota is None else self.quota,
            profile=row.profile if self.profile is None else self.profile,
        )
        if changed.profile and changed.chunk_bytes is None:
            raise _refusal("profile", "an opaque layout has no model's columns")
        for tier, codec in changed.codecs.items():
            if tier == "hbm" and codec not in _DEVICE_CODECS:
                raise _refusal(f"codecs.{tier}", f"device memory holds {', '.join(_DEVICE_CODECS)}")
            if codec in _TENSOR_CODECS and changed.chunk_bytes is None:
                raise _refusal(f"codecs.{tier}", f"{codec} needs a tensor layout, and this one is opaque")
            if codec in _LOSSY_CODECS and not changed.lossy:
                raise _refusal(f"codecs.{tier}", f"{codec} is lossy, which `lossy` must allow")
            if codec in _PROFILED_CODECS and not changed.profile:
                raise _refusal(f"codecs.{tier}", f"{codec} needs the setting `profile`, a profile of the model")
        return changed


@dataclass(frozen=True)
class Declaration:
    """A whole declaration: identity with every default filled in, and the settings that came with it."""

    identity: Mapping[str, object]
    settings: NamespaceSettings
    chunk_bytes: int | None

    @cached_property
    def canonical(self) -> bytes:
        """The identity as canonical JSON."""
        return canonical_json(self.identity)

    @cached_property
    def fingerprint(self) -> bytes:
        """BLAKE3 of it."""
        return fingerprint(self.canonical)

    def row(self, *, bucket: str, name: str, wrapped_key: bytes, root: bytes, owner: str, now_ms: int) -> NamespaceRow:
        """The row of a namespace declared so, with its settings."""
        identity = self.identity
        row = NamespaceRow(
            bucket=bucket,
            name=name,
            declaration=self.canonical,
            fingerprint=self.fingerprint,
            wrapped_key=wrapped_key,
            root=root,
            ids=str(identity["ids"]),
            chunk_tokens=int(str(identity["chunk_tokens"])),
            chunk_bytes=self.chunk_bytes,
            part_axis=None if identity["part_axis"] is None else str(identity["part_axis"]),
            created_ms=now_ms,
            owner=owner,
        )
        return self.settings.over(row)


def parse_declaration(document: Mapping[str, object]) -> Declaration:
    """Read a decoded JSON or msgpack document. `InvalidRequestError` with the dotted name of the field at fault as `field`."""
    try:
        parsed = msgspec.convert(dict(document), _Document)
    except msgspec.ValidationError as error:
        raise _refusal(_field_of(str(error)), _problem_of(str(error))) from error
    layout = _completed(parsed.layout)
    chunk_bytes = _chunk_bytes(layout, parsed.chunk_tokens)
    _check(parsed, layout)
    identity: dict[str, object] = {
        "model": parsed.model,
        "revision": parsed.revision,
        "tokenizer": parsed.tokenizer,
        "chunk_tokens": parsed.chunk_tokens,
        "layout": {"kind": "opaque"} if layout.kind == "opaque" else msgspec.to_builtins(layout),
        "rank": msgspec.to_builtins(parsed.rank),
        "adapter": parsed.adapter,
        "rope": msgspec.to_builtins(parsed.rope),
        "salt": parsed.salt,
        "part_axis": parsed.part_axis,
        "ids": parsed.ids,
    }
    declaration = Declaration(identity, _settings(parsed), chunk_bytes)
    try:
        _ = declaration.canonical
    except ValueError as error:
        raise _refusal("declaration", str(error)) from error
    return declaration


def differs(one: bytes, other: bytes) -> tuple[str, ...]:
    """The dotted names of the identity fields in which two canonical declarations differ, sorted. Empty bytes stand for that of the
    namespace `default`, which declares nothing."""
    a, b = _flat(one), _flat(other)
    return tuple(sorted(name for name in a.keys() | b.keys() if a.get(name, _flat) != b.get(name, _flat)))


def identity_of(declaration: bytes) -> dict[str, object]:
    """A canonical declaration as a document, for replies."""
    return msgspec.json.decode(declaration, type=dict[str, object]) if declaration else {}


def settings_of(row: NamespaceRow) -> dict[str, object]:
    """A row's settings as a document, for replies."""
    quota = {"chunks": row.quota.chunks, "size_bytes": row.quota.size_bytes}
    profile = row.profile.hex() or None
    return {"codecs": row.codecs, "lossy": row.lossy, "access": row.access, "quota": quota, "profile": profile}


def _completed(layout: Layout) -> Layout:
    if layout.kind == "opaque":
        for name in ("dtype", "layers", "kv_heads", "head_dim", "order"):
            if getattr(layout, name) is not None:
                raise _refusal(f"layout.{name}", "an opaque layout has only its kind")
        return layout
    kv_heads = 1 if layout.kind == "mla" and layout.kv_heads is None else layout.kv_heads
    for name, value in (
        ("dtype", layout.dtype), ("layers", layout.layers), ("kv_heads", kv_heads), ("head_dim", layout.head_dim),
    ):  # fmt: skip
        if value is None:
            raise _refusal(f"layout.{name}", f"is missing: a layout of kind {layout.kind} has it")
    if layout.kind == "mla" and kv_heads != 1:
        raise _refusal("layout.kv_heads", "is 1 in a layout of kind mla")
    order = _AXES if layout.order is None else layout.order
    if sorted(order) != sorted(_AXES):
        raise _refusal("layout.order", f"must have each of {', '.join(_AXES)} once")
    return msgspec.structs.replace(layout, kv_heads=kv_heads, order=order)


def _chunk_bytes(layout: Layout, chunk_tokens: int) -> int | None:
    if layout.kind == "opaque":
        return None
    assert layout.dtype is not None
    tensors = 2 if layout.kind == "kv" else 1
    dimensions = (layout.layers or 0, layout.kv_heads or 0, layout.head_dim or 0)
    size_bytes = tensors * math.prod(dimensions) * chunk_tokens * _DTYPE_BYTES[layout.dtype]
    if size_bytes > CHUNK_BYTES_MAX:
        raise _refusal("layout", f"gives chunks of {size_bytes} bytes, and {CHUNK_BYTES_MAX} are the most")
    return size_bytes


def _check(parsed: _Document, layout: Layout) -> None:
    for name, (index, count) in (("tensor", parsed.rank.tensor), ("pipeline", parsed.rank.pipeline)):
        if index >= count:
            raise _refusal(f"rank.{name}", f"index {index} is not below the count {count}")
    if parsed.part_axis == "layer" and layout.kind == "opaque":
        raise _refusal("part_axis", "an opaque layout has no layers")
    if parsed.part_axis == "kv" and layout.kind != "kv":
        raise _refusal("part_axis", "only a layout of kind kv has K and V")
    if parsed.adapter is not None and parsed.ids in _ADAPTERLESS:
        raise _refusal("adapter", f"{parsed.ids} names adapters by more than this: declare ids foreign")
    if parsed.rope is not None and not math.isfinite(parsed.rope.theta):
        raise _refusal("rope.theta", "must be a finite number")


def _settings(parsed: _Document) -> NamespaceSettings:
    quota = parsed.quota
    return NamespaceSettings(
        codecs=None
        if parsed.codecs is UNSET
        else {str(tier): str(codec) for tier, codec in (parsed.codecs or {}).items()},
        lossy=None if parsed.lossy is UNSET else bool(parsed.lossy),
        access=None if parsed.access is UNSET else {user: str(level) for user, level in (parsed.access or {}).items()},
        quota=None
        if quota is UNSET
        else NamespaceQuota()
        if quota is None
        else NamespaceQuota(quota.chunks, quota.size_bytes),
        profile=None if parsed.profile is UNSET else bytes.fromhex(parsed.profile or ""),
    )


@lru_cache(maxsize=1024)
def _flat(declaration: bytes) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in identity_of(declaration).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": member for inner, member in value.items()})
        else:
            flat[name] = value
    return flat


def _field_of(message: str) -> str:
    at = _PATH.search(message)
    outer = at[2] if at else ""
    unknown = _UNKNOWN.search(message) or re.search(r"missing required field `(.*?)`", message)
    return ".".join(part for part in (outer, unknown[1] if unknown else "") if part) or "declaration"


def _problem_of(message: str) -> str:
    """What msgspec found, with the words that would have been right where there are some."""
    problem = message.split(" - at ", maxsplit=1)[0]
    wrong, at = _NO_CHOICE.fullmatch(problem), _PATH.search(message)
    field = re.sub(r"\[\d+\]", "[...]", _field_of(message))
    choices = _CHOICES.get(f"{field} (key)" if at and at[1] else field)
    return problem if wrong is None or choices is None else f"{wrong[1]} is none of {', '.join(choices)}"


def _refusal(field: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {problem}", field=field)
