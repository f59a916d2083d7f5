"""A checkout of this working tree for tests that run `make`: they must not write into the tree, nor see it change."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runs import ROOT

NEEDED = ("Makefile", ".dockerignore", ".flyteignore", ".gitignore", "requirements.lock", "tasks", "workflows",
          "images", "kernels/README.md", "kernels/src")
SETTINGS = ("FLYTE", "_FLYTE", "FLOWMILL_", "MLFLOW_", "AWS_", "MAKE", "MFLAGS", "GIT_")
VARIABLES = ("PROJECT", "DOMAIN", "REGISTRY", "TAG", "VARIANT", "COPY", "VERSION", "TLS", "VENV", "HTTP_PROXY",
             "http_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True)
class Made:
    """What a `make` left."""

    code: int
    output: str
    """stdout and stderr together."""


@dataclass(frozen=True)
class Checkout:
    """A folder with a commit of its own."""

    folder: Path
    home: Path

    def environment(self, **changes: str) -> dict[str, str]:
        """This process' environment without what is set for Flyte, stores and make; a home without config files."""
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(SETTINGS) and name not in VARIABLES}
        return {**kept, "HOME": str(self.home), "COLUMNS": "10000", "NO_COLOR": "1", "NO_PROXY": "127.0.0.1", **changes}

    def run(self, *command: str | Path, **changes: str) -> Made:
        done = subprocess.run([str(part) for part in command], cwd=self.folder, env=self.environment(**changes),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
        return Made(done.returncode, done.stdout)

    def make(self, target: str, *variables: str, **changes: str) -> Made:
        """Run `make target` with this interpreter's environment as VENV, whatever its age."""
        venv = Path(sys.prefix)
        return self.run("make", "-o", venv / ".installed", f"VENV={venv}", target, *variables, **changes)

    def program(self, name: str) -> Path:
        """A program beside this interpreter."""
        return Path(sys.prefix) / "bin" / name

    def git(self, *arguments: str) -> str:
        made = self.run("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments)
        assert made.code == 0, made.output
        return made.output.strip()

    def commit(self) -> str:
        """The commit's first 12 digits, as make prints it."""
        return self.git("rev-parse", "HEAD")[:12]


def new_checkout(folder: Path) -> Checkout:
    """Copy what packaging and registering read, and commit it."""
    for program in ("git", "make"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    for name in NEEDED:
        source, target = ROOT / name, folder / "flowmill" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "results", ".*"))
        else:
            shutil.copy(source, target)
    made = Checkout(folder / "flowmill", folder / "home")
    made.home.mkdir()
    made.git("init", "--quiet")
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "all")
    return made
