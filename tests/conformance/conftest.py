"""Rules that hold for the plugins of every axis."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "diffusers", "transformers", "peft", "onnxruntime", "tesserocr", "numpy", "flytekit", "mlflow"}
FORBIDDEN = {"flytekit", "distributed", "resources", "resource", "rank", "get_rank", "world_size", "get_world_size",
             "local_rank", "RANK", "LOCAL_RANK", "WORLD_SIZE", "environ", "getenv"}


@pytest.fixture(scope="session")
def heavy_imports_of():
    """Function: the heavy packages that importing a module loads, in a process of its own."""
    def find(module):
        code = f"import sys, {module}; print(*set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                              cwd=Path(__file__).parents[2])
        return HEAVY & set(done.stdout.split())

    return find


@pytest.fixture(scope="session")
def forbidden_names():
    """Function: imports, names and strings that reach for ranks, resources, Flyte or the environment."""
    def find(module):
        found = set()
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            match node:
                case ast.Import(names=aliases):
                    found |= {part for alias in aliases for part in alias.name.split(".")}
                case ast.ImportFrom(module=source, names=aliases):
                    found |= {*(source or "").split("."), *(alias.name for alias in aliases)}
                case ast.Attribute(attr=word) | ast.Name(id=word) | ast.arg(arg=word) | ast.keyword(arg=word):
                    found.add(word)
                case ast.Constant(value=str() as word):
                    found.add(word)
        return found & FORBIDDEN

    return find
