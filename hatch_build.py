"""The build hook: compiles the native library into the wheel, or in place for an editable install.

Where that fails kvobj is installed all the same and runs on its pure twins.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Runs `kvobj/native/build.py` by its path, since kvobj is not installed yet."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See hatchling's `BuildHookInterface.initialize`."""
        path = Path(self.root) / "kvobj" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("kvobj_native_build", path)
        if spec is None or spec.loader is None:
            return
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        try:
            library = build.build()
        except build.BuildError as error:
            sys.stderr.write(f"the native library is left out: {error}\n")
            return
        if version != "editable":
            build_data["artifacts"].append(library.relative_to(self.root).as_posix())
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
