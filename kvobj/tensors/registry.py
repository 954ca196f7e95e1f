"""Which module holds which codec, and whether it can be used here. Modules are imported when first asked for."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from kvobj.errors import FrameCorruptError, InvalidRequestError, UnavailableError
from kvobj.tensors.codec_names import CodecName
from kvobj.tensors.codec_protocol import TensorCodec
from kvobj.tensors.form import TensorForm
from kvobj.tensors.frame import TensorFrame, form_refusal
from kvobj.tensors.kernels.load import status


def codec_named(name: str) -> TensorCodec:
    """The codec of a name or preset. ValueError for one that does not exist, `UnavailableError` where this version lacks it."""
    return _codec(str(CodecName.parse(name)))


def unavailable(codec: str) -> str | None:
    """Why a codec cannot be used on this machine, for people; None if it can. ValueError for a name that does not exist."""
    kind = CodecName.parse(codec).kind
    if not _has_module(kind.name):
        return f"this version of kvobj has no {kind.name}"
    kernels = status()
    return None if kernels.is_loaded else f"no CPU kernels: {kernels.detail}"


def refusal(codec: str, form: TensorForm) -> str | None:
    """Why a codec does not take a form, for people; None if it does. ValueError for a name that does not exist."""
    return form_refusal(form) or codec_named(codec).refusal(form)


def usable_codec(codec: str, form: TensorForm) -> TensorCodec:
    """The codec, if it can be used here and takes the form; else `UnavailableError` or `InvalidRequestError`, which say why."""
    found, problem = _available(codec), refusal(codec, form)
    if problem is not None:
        raise InvalidRequestError(f"codec {codec}: {problem}", codec=codec)
    return found


def reading_codec(head: TensorFrame) -> TensorCodec:
    """The codec of a parsed frame, where it can be used here (`UnavailableError`) and writes such frames (`FrameCorruptError`)."""
    found, problem = _available(head.codec), refusal(head.codec, head.form)
    if problem is not None:
        raise FrameCorruptError("frame of a form that its codec does not take", codec=head.codec, problem=problem)
    return found


def _available(codec: str) -> TensorCodec:
    missing = unavailable(codec)
    if missing is not None:
        raise UnavailableError(f"codec {codec}: {missing}")
    return codec_named(codec)


@cache
def _has_module(name: str) -> bool:
    return find_spec(f"kvobj.tensors.{name}") is not None


@lru_cache(maxsize=256)
def _codec(name: str) -> TensorCodec:
    parsed = CodecName.parse(name)
    if not _has_module(parsed.kind.name):
        raise UnavailableError(f"this version of kvobj has no {parsed.kind.name}")
    module = import_module(f"kvobj.tensors.{parsed.kind.name}")
    return cast("TensorCodec", module.codec(parsed.step_index))
