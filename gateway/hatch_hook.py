"""Makes the distribution of a gateway alone of the whole project's description, and of two of its packages.

Runs in the build's own environment, where this project cannot be imported.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGES: Final = ("gateway", "shared")
NOT_SHIPPED: Final = ("__pycache__", "Dockerfile", "hatch_hook.py", "pyproject.toml")
SAME: Final = ("version", "description", "requires-python", "keywords", "classifiers")


class GatewayMetadata(MetadataHookInterface):  # type: ignore[misc]  # its base is not installed where mypy runs
    def update(self, metadata: dict[str, Any]) -> None:
        """Take what describes the distribution from the whole project's."""
        root = Path(self.root).parent
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"]
        metadata.update({name: project[name] for name in SAME})
        metadata["readme"] = {"content-type": "text/markdown", "text": (root / project["readme"]).read_text()}
        metadata["dependencies"] = [*project["dependencies"], *extras["gateway"]]
        metadata["optional-dependencies"] = {"otel": extras["otel"]}


class GatewayPackages(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Include the packages, one of which lies beside this one."""
        root = Path(self.root).parent
        for package in PACKAGES:
            for path in sorted((root / package).rglob("*")):
                if path.is_file() and not set(path.parts).intersection(NOT_SHIPPED):
                    build_data["force_include"][str(path)] = str(path.relative_to(root))
