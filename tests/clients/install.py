"""Where clients are installed: a folder that git does not see, which is kept from run to run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".clients"
NPM = CACHE / "npm"
NODE = "node@24"  # what agents run with
OLDEST_NODE = 22  # of the machine: npm takes old releases of agents, and says nothing, where Node is older
INSTALL_TIMEOUT_S = 1800.0


class NotInstalledError(Exception):
    """Says why."""


@dataclass(frozen=True, slots=True)
class Here:
    """A package of the environment that runs this, which the Makefile has installed."""

    package: str

    def install(self, *, upgrade: bool) -> str:  # noqa: ARG002
        """Returns the version. Raises NotInstalledError."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            raise NotInstalledError(f"{self.package} is not in {sys.prefix}") from None


@dataclass(frozen=True, slots=True)
class Npm:
    """A package of npm's, and what is used with it."""

    package: str
    others: tuple[str, ...] = ()

    def install(self, *, upgrade: bool) -> str:
        """Returns the version. Raises NotInstalledError."""
        packages = (self.package, *self.others)
        NPM.mkdir(parents=True, exist_ok=True)
        if not (NPM / "package.json").exists():
            (NPM / "package.json").write_text('{"private": true}\n')
        if upgrade or not manifest("node").exists():
            run(["npm", "install", "--no-audit", "--no-fund", NODE], cwd=NPM)
        if upgrade or not all(manifest(each).exists() for each in packages):
            run(["npm", "install", "--no-audit", "--no-fund", *(f"{each}@latest" for each in packages)], cwd=NPM)
        if not manifest(self.package).exists():
            raise NotInstalledError(f"npm has not installed {self.package}")
        return str(json.loads(manifest(self.package).read_text())["version"])


@dataclass(frozen=True, slots=True)
class OwnEnvironment:
    """A package of PyPI's that brings too much for an environment that others share."""

    package: str
    before: tuple[str, ...] = ()  # installed first
    requirement: str = ""  # with extras, where the package's name is not all
    others: tuple[str, ...] = ()  # installed with it

    def install(self, *, upgrade: bool) -> str:
        """Returns the version. Raises NotInstalledError."""
        python = environment(self.package) / "bin" / "python"
        if not python.exists():
            run([sys.executable, "-m", "venv", str(environment(self.package))])
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        if upgrade or not self.find_version():
            for requirements in filter(None, (self.before, (self.requirement or self.package, *self.others))):
                run([*pip, *(["--upgrade"] if upgrade else []), *requirements])
        if not (version := self.find_version()):
            raise NotInstalledError(f"pip has not installed {self.package}")
        return version

    def find_version(self) -> str:
        """Empty: it is not there."""
        folders = [str(each) for each in environment(self.package).glob("lib/python*/site-packages")]
        return next((each.version for each in metadata.distributions(name=self.package, path=folders)), "")


def environment(package: str) -> Path:
    return CACHE / package


def manifest(package: str) -> Path:
    return NPM / "node_modules" / package / "package.json"


def search_path() -> str:
    """PATH with npm's programs first, node among them."""
    return f"{NPM / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}"


def check_node() -> None:
    """Raises SystemExit, with one line, where the machine has no Node, or one that is too old."""
    node = shutil.which("node")
    told = subprocess.run([node, "--version"], capture_output=True, text=True).stdout.strip() if node else ""
    found = re.match(r"v(\d+)\.", told)
    if found is None or int(found[1]) < OLDEST_NODE:
        raise SystemExit(
            f"agents need Node {OLDEST_NODE} or newer, and this machine has {told or 'none'}: install it, or choose "
            "others with --only"
        )


def run(command: Sequence[str], cwd: Path | None = None) -> None:
    """Raises NotInstalledError with the command's last lines."""
    if shutil.which(command[0]) is None:
        raise NotInstalledError(f"there is no {command[0]} on this machine")
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=os.environ | {"PATH": search_path()},
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"{' '.join(command[:3])}: not done after {INSTALL_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise NotInstalledError(f"{' '.join(command[:3])}: {' / '.join(done.stderr.splitlines()[-3:])}")
