"""The build hook: compiles the native libraries into the wheel, or in place for an editable install.

Where that fails kvobj is installed all the same: it runs on its pure twins, and without tensor codecs.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILDS = ("kvobj/native/build.py", "kvobj/tensors/kernels/build.py")


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Runs the builds by their paths, since kvobj is not installed yet."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling's `BuildHookInterface.initialize`."""
        made = [library for path in _BUILDS for library in self._built(Path(self.root) / path)]
        if made and version != "editable":
            build_data["artifacts"] += [library.relative_to(self.root).as_posix() for library in made]
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"

    @staticmethod
    def _built(path: Path) -> list[Path]:
        spec = importlib.util.spec_from_file_location("_".join(path.parts[-3:-1]) + "_build", path)
        if spec is None or spec.loader is None:
            return []
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            made: list[Path] = build.build()
        except build.BuildError as error:
            sys.stderr.write(f"left out: {error}\n")
            return []
        return made
