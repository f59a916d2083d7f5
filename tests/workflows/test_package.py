"""The package: what `make package` writes, read back from the file. What Flyte is given of a stage: test_flyte.py."""

import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from k8s.stack.__main__ import package_command
from k8s.stack.propeller import Package
from tests.runs import ROOT
from tests.workflows.checkout import Checkout, new_checkout

LIMIT_S = 10.0
MEGABYTE = 2**20
ROLE_OF = {"rollout": "rollout", "reward": "reward", "advantage": "advantage", "update": "update",
           "evaluate": "evaluate"}
SECRETS = (".env", "credentials.json", "flowmill-s3.pem", "id_ed25519", ".flyte/config.yaml", "tasks/.env",
           "tasks/store/minio.key", "tasks/policies/assets/.token", "workflows/.env.local", "workflows/recipes/ca.pem")
"""Files that hold a secret in somebody's checkout."""
IGNORED = ("tasks/store/mine.json", "workflows/recipes/mine.yaml")
"""Files that this checkout's git ignores."""
CLUTTER = (".venv/lib/module.py", ".flowmill/store/data.bin", "kernels/src/extra.py", "mlflow.db", "mlruns/0/meta.yaml",
           "dist/old.tgz", "tests/test_a.py", "k8s/secrets.sh", "notes.ipynb", "tasks/__pycache__/a.cpython-311.pyc",
           "workflows/results/demo.json", "images/train.Dockerfile")
GPU = {"cpu": 8, "memory_bytes": 64 * 2**30, "gpus": 2, "shared_memory_bytes": 2**30, "retries": 3, "timeout_s": 7200,
       "interruptible": True}


def checkout_with_clutter(folder: Path) -> Checkout:
    """A checkout as it looks after some use: an environment, a store, runs, and files with secrets."""
    made = new_checkout(folder)
    for name in (*SECRETS, *CLUTTER, *IGNORED):
        path = made.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("secret")
    (made.folder / ".git" / "info" / "exclude").write_text("".join(f"/{name}\n" for name in IGNORED))
    return made


def package(checkout: Checkout, *variables: str) -> tuple[Package, float]:
    """What `make package` wrote, and its seconds."""
    started = time.monotonic()
    made = checkout.make("package", *variables)
    seconds = time.monotonic() - started
    assert made.code == 0, made.output
    return Package.read(checkout.folder / "dist" / "flowmill.tgz"), seconds


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Checkout:
    return checkout_with_clutter(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def packaged(checkout) -> tuple[Package, float]:
    return package(checkout, "COPY=all", "REGISTRY=registry.example.org/team", "TAG=1.2")


@pytest.fixture(scope="module")
def members(packaged) -> dict[str, tarfile.TarInfo]:
    """Name -> member of the code that travels."""
    with tarfile.open(fileobj=io.BytesIO(packaged[0].code)) as archive:
        found = archive.getmembers()
    assert len({member.name for member in found}) == len(found), "no name twice"
    return {member.name: member for member in found}


def control_tasks(found: Package) -> dict[str, Any]:
    """The tasks around the stages."""
    return {name: task for name, task in found.tasks.items() if name.startswith("workflows.")}


def sizes(entries: Any) -> dict[str, float]:
    names = {1: "cpu", 2: "gpus", 3: "memory_bytes"}
    return {names[entry.name]: float(entry.value) for entry in entries}


def test_packaging_takes_seconds(packaged):
    """Registration is on the way of every change; it needs no torch, no model and no network."""
    assert packaged[1] < LIMIT_S


def test_every_task_names_its_image_its_commit_and_its_command(packaged, checkout):
    found, _ = packaged
    assert found.tasks.keys() >= {f"workflows.tracking.{name}" for name in ("plan", "record", "finish", "fail")}
    for name, task in found.tasks.items():
        image = "reward" if name == "tasks.reward.reward" else "train"
        assert task.container.image == f"registry.example.org/team/flowmill-{image}:1.2", name
        environment = {item.key: item.value for item in task.container.env}
        assert environment["FLOWMILL_COMMIT"] == checkout.commit(), name
        arguments, (module, _, function) = list(task.container.args), name.rpartition(".")
        assert arguments[:6] == ["pyflyte-fast-execute", "--additional-distribution", "{{ .remote_package_path }}",
                                 "--dest-dir", "/workspace", "--"], name
        assert arguments[-4:] == ["task-module", module, "task-name", function]


def test_the_tasks_around_the_stages_ask_for_what_the_topology_says(packaged):
    found, _ = packaged
    role = yaml.safe_load((ROOT / "workflows" / "recipes" / "base.yaml").read_text())["topology"]["control"]
    for name, task in control_tasks(found).items():
        resources = task.container.resources
        assert sizes(resources.requests) == sizes(resources.limits) == {
            "cpu": role["cpu"], "memory_bytes": role["memory_bytes"]}, name
        assert not task.HasField("extended_resources"), name
        assert not task.metadata.interruptible, name
        assert task.metadata.retries.retries > 0, name
        assert task.metadata.pod_template_name == "flowmill-cpu", name
        assert (task.metadata.discoverable, task.metadata.discovery_version) == (False, ""), name


@pytest.fixture(scope="module")
def packaged_for_gpu(tmp_path_factory) -> Package:
    """What is packaged when the topology asks for GPUs everywhere."""
    checkout = new_checkout(tmp_path_factory.mktemp("gpu"))
    path = checkout.folder / "workflows" / "recipes" / "base.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["topology"] = {role: values if role == "secrets" else {**values, **GPU}
                          for role, values in recipe["topology"].items()}
    path.write_text(yaml.safe_dump(recipe))
    return package(checkout)[0]


def test_a_topology_with_gpus_is_asked_for_by_every_task(packaged_for_gpu):
    for name, task in packaged_for_gpu.tasks.items():
        resources = task.container.resources
        assert sizes(resources.requests) == sizes(resources.limits) == {
            key: GPU[key] for key in ("cpu", "gpus", "memory_bytes")}, name
        assert int(task.extended_resources.shared_memory.size_limit) == GPU["shared_memory_bytes"], name
        assert task.extended_resources.shared_memory.mount_path == "/dev/shm", name
        assert task.metadata.pod_template_name == "flowmill-gpu", name
        assert task.metadata.retries.retries == GPU["retries"], name
        assert task.metadata.interruptible, name
        limit_s = 0 if name == "workflows.iteration.train" else GPU["timeout_s"]
        assert task.metadata.timeout.seconds == limit_s, name


def test_the_package_is_registered_as_make_register_does_but_for_project_and_version(packaged):
    found, _ = packaged
    assert found.workflows.keys() == {"workflows.flowgrpo.flowgrpo"}
    identifiers = [entity.id for kind in (found.tasks, found.workflows) for entity in kind.values()]
    assert {(item.project, item.domain, item.version) for item in identifiers} == {("", "", "")}
    schedules = {name: plan.entity_metadata.schedule.cron_schedule.schedule
                 for name, plan in found.launch_plans.items() if plan.entity_metadata.HasField("schedule")}
    assert schedules == {"flowgrpo_nightly": "0 2 * * *"}


def test_no_launch_plan_throws_the_cache_away(packaged):
    for name, plan in packaged[0].launch_plans.items():
        assert not plan.overwrite_cache, name
        assert not plan.HasField("interruptible"), f"{name}: each stage's own setting holds"


# ---- the code that travels -------------------------------------------------------------------------------------------


def imported_by(checkout: Checkout, *modules: str) -> set[str]:
    """The project's files that are imported with these modules, in a process of its own."""
    code = ("import importlib, json, pathlib, sys\n"
            f"for name in {modules!r}: importlib.import_module(name)\n"
            "root = pathlib.Path.cwd()\n"
            "files = [pathlib.Path(module.__file__) for module in list(sys.modules.values())\n"
            "         if getattr(module, '__file__', None)]\n"
            "print(json.dumps([str(path.relative_to(root)) for path in files if path.is_relative_to(root)]))")
    made = checkout.run(sys.executable, "-c", code, PYTHONPATH="")
    assert made.code == 0, made.output
    return set(json.loads(made.output.splitlines()[-1]))


def test_every_module_that_the_workflows_import_travels(members, checkout):
    names = imported_by(checkout, *(f"workflows.{name}" for name in ("flowgrpo", "launch_plans", "reconcile",
                                                                     "preflight")))
    assert {"workflows/iteration.py", "tasks/update.py", "tasks/store/bucket.py"} <= names
    assert names <= members.keys()


def test_plugins_recipes_prompts_and_checkpoints_travel(members, checkout):
    """They are found by name while a run goes, so no import shows them."""
    wanted = {name for name in checkout.git("ls-files", "tasks/policies", "tasks/algorithms", "tasks/rewards",
                                            "workflows/recipes").splitlines()
              if not re.search(r"README\.md$|/_pretrain_tiny_text\.py$", name)}
    assert {"tasks/policies/assets/tiny_text.safetensors", "workflows/recipes/base.yaml"} <= wanted
    assert wanted <= members.keys()


def test_nothing_else_travels(members):
    tops = {PurePosixPath(name).parts[0] for name in members}
    assert tops == {"tasks", "workflows", ".dockerignore"}, "flytekit's matcher always keeps .dockerignore"
    assert members.keys().isdisjoint(CLUTTER + IGNORED)
    for name, member in members.items():
        path = PurePosixPath(name)
        assert member.isfile(), f"{name} is a link or a folder"
        assert not path.is_absolute(), name
        assert ".." not in path.parts, name
        assert not {"kernels", ".git", ".venv", "__pycache__", "tests"} & set(path.parts), name
        assert member.size < 8 * MEGABYTE, f"{name}: {member.size} bytes would be downloaded by every pod"


def test_no_file_with_a_secret_travels(members):
    assert members.keys().isdisjoint(SECRETS)


def test_the_code_is_as_small_as_a_picture(packaged):
    assert 0 < len(packaged[0].code) < 8 * MEGABYTE


def test_the_package_holds_one_archive_of_code_and_nothing_twice(packaged, checkout):
    with tarfile.open(checkout.folder / "dist" / "flowmill.tgz") as archive:
        names = archive.getnames()
    assert len(set(names)) == len(names)
    assert sum(name.endswith(".tar.gz") for name in names) == 1
    assert [name for name in names if not re.fullmatch(r"fast[0-9a-f]{32}\.tar\.gz|\d\d_[\w.]+_[123]\.pb", name)] == []
    found, _ = packaged
    assert len(names) == 1 + len(found.tasks) + len(found.workflows) + len(found.launch_plans)


def test_code_that_is_in_the_images_does_not_travel(tmp_path):
    found, seconds = package(new_checkout(tmp_path), "COPY=none")
    assert found.code == b""
    with tarfile.open(tmp_path / "flowmill" / "dist" / "flowmill.tgz") as archive:
        assert [name for name in archive.getnames() if not name.endswith(".pb")] == []
    assert {task.container.args[0] for task in found.tasks.values()} == {"pyflyte-execute"}
    assert seconds < LIMIT_S


@pytest.mark.parametrize(("copy", "fast"), [("all", True), ("none", False)])
def test_the_stack_packages_with_the_very_command(copy, fast):
    printed = subprocess.run(["make", "--dry-run", "package", f"VENV={sys.prefix}", f"COPY={copy}"], cwd=ROOT,
                             check=True, capture_output=True, text=True).stdout
    command, = re.findall(r"^\S+pyflyte .*", printed.replace("\\\n", " "), re.MULTILINE)
    words = shlex.split(command)
    assert words[-2] == "--env", "the commit: images hold their own"
    assert words[:-2] == package_command(
        {name: f"localhost/flowmill-{name}:0.1.0-cpu" for name in ("train", "reward")}, Path("dist/flowmill.tgz"), fast)
