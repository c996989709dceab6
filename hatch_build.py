"""Installing the package compiles the native kernels where there is a compiler. Without one the package works all the same, on torch."""

import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = "services/compute/backends/cpu/build.py"


class KernelsHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        spec = importlib.util.spec_from_file_location("penstock_build", Path(self.root) / BUILD)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        problem = module.build()
        if problem is not None:
            sys.stderr.write(f"penstock: no native kernels: {problem}\n")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append(str(module.LIBRARY.relative_to(self.root)))
