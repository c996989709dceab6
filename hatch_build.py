"""Installing the package, and `pip wheel`, compile the native kernels where there is a compiler. Without one the
package works all the same, on torch.

A wheel with kernels serves every Python 3, since they are built against neither Python nor torch; its
tag says which systems have the C and C++ libraries that they ask for.
"""

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = "services/compute/backends/cpu/build.py"
# The manylinux tags: 2.x of glibc, and the newest GLIBCXX_3.4.x that such systems have. None is
# older than the tag of torch's own wheels.
SYSTEMS = ((28, 24), (31, 28), (34, 29), (35, 30), (39, 33))


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
        build_data["tag"] = f"py3-none-{platform_tag(module.LIBRARY.read_bytes())}"
        build_data["artifacts"].append(str(module.LIBRARY.relative_to(self.root)))


def platform_tag(library: bytes) -> str:
    """manylinux_2_x of this machine, by the versions of symbols that the library asks for; where none fits, or its C
    library is not glibc, this very system."""
    if sys.platform == "darwin":  # as the library was compiled, whatever systems this Python is for
        return "macosx_11_0_arm64"
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    glibc, glibcxx = newest(library, rb"GLIBC_2"), newest(library, rb"GLIBCXX_3\.4")
    if glibc == 0:
        return here
    machine = here.removeprefix("linux_")
    return next((f"manylinux_2_{c}_{machine}" for c, cxx in SYSTEMS if glibc <= c and glibcxx <= cxx), here)


def newest(library: bytes, family: bytes) -> int:
    """The largest x of the library's strings `family.x`; 0: it has none."""
    return max((int(found) for found in re.findall(rb"\0" + family + rb"\.(\d+)[.\d]*(?=\0)", library)), default=0)
