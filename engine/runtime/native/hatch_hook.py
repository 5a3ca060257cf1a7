"""Has hatch run build.py: a wheel or an editable checkout gets the libraries where there is a compiler.

Runs in the build's own environment, where this project cannot be imported.
"""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]  # its base is not installed where mypy runs
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries. An installation without a compiler succeeds; its engine computes in torch and
        logs it."""
        if self.target_name != "wheel":
            return
        native = runpy.run_path(str(Path(self.root, "engine", "runtime", "native", "build.py")))
        try:
            native["build"]()
        except native["BuildFailed"] as failure:
            self.app.display_warning(f"Without native kernels: {failure}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
