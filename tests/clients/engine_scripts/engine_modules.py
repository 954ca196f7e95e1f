"""Import the modules of vLLM and SGLang that lie in `.envs/engine-modules` (tools/take_engine_modules.py) without the rest of them.

An engine's own `__init__` modules pull in its models and servers, so its packages are entered without them; what needs a GPU or
serves requests, and is never called by what is tested, is stood in for by modules of empty names. The classes under test and all
that they stand on in KV offloading are the wheel's own.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import MutableSequence, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / ".envs" / "engine-modules"


class _Nothing:
    """Takes every use as a type, a decorator or a function, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __call__(self, *given: Any, **named: object) -> Any:  # noqa: ANN401
        return given[0] if len(given) == 1 and callable(given[0]) and not named else _Nothing()

    def __getitem__(self, _: object) -> _Nothing:
        return _Nothing()

    def __or__(self, other: object) -> object:
        return other

    __ror__ = __or__


class _StandIn(ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012 - read alone

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Nothing,), {}) if name[0].isupper() else _Nothing()
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named modules and all below them, before anything else does."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def find_spec(
        self, fullname: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def enter(name: str, version: str, *, packages: Sequence[str], stand_ins: Sequence[str]) -> None:
    """Make an engine's modules importable. RuntimeError where they are of another version."""
    root = FOLDER / name
    metadata = root / f"{name}-{version}.dist-info" / "METADATA"
    if not metadata.exists() or f"\nVersion: {version}\n" not in metadata.read_text():
        raise RuntimeError(f"{name} {version} is not in {FOLDER}: make engine-envs")
    for package in packages:
        module = ModuleType(package)
        module.__path__ = [str(root / package.replace(".", "/"))]
        sys.modules[package] = module
        parent, _, child = package.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.meta_path.insert(0, _StandIns(stand_ins))
    importlib.invalidate_caches()


def enter_vllm() -> None:
    """vLLM's KV offloading: manager, primary tier, spec, factory, metrics. Of its configuration only names are needed."""
    connector = "vllm.distributed.kv_transfer.kv_connector"
    enter(
        "vllm",
        "0.33.0",
        packages=("vllm", "vllm.distributed", "vllm.distributed.kv_transfer", connector, f"{connector}.v1"),
        stand_ins=("vllm.config", f"{connector}.factory"),
    )


def enter_sglang() -> None:
    """SGLang's HiCache storage: interface, factory, host memory pools. Its kernels are for GPUs."""
    enter(
        "sglang",
        "0.5.23",
        packages=("sglang", "sglang.srt"),
        stand_ins=(
            *("sglang.kernels", "sglang.srt.compilation", "sglang.srt.configs", "sglang.srt.disaggregation"),
            *("sglang.srt.layers", "sglang.srt.model_executor", "sglang.srt.server_args", "sgl_kernel", "triton"),
            *("orjson", "pybase64", "PIL", "starlette", "pydantic_core"),
        ),
    )
